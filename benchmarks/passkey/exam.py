"""Asks a running service all questions of an exam, and counts what it gets right."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from base.errors import StartupError
from benchmarks.passkey.question import Question, make_question
from benchmarks.serving.client import Endpoint, error_message

_ANSWER_TOKENS = 8
"""The key has five; what follows shows that it ends there."""


@dataclass(frozen=True)
class Marked:
    """A question with the answer to it."""

    length: int
    question: Question
    answer: str

    @property
    def is_right(self) -> bool:
        return self.question.is_answered_by(self.answer)


def questions(lengths: Sequence[int], count: int, seed: int) -> list[tuple[int, Question]]:
    """So many of each length, in tokens, with the length. Raises StartupError for one that cannot be."""
    try:
        return [
            (length, make_question(f"{seed}/{length}/{number}", length))
            for length in lengths
            for number in range(count)
        ]
    except ValueError as error:
        raise StartupError(f"--lengths {','.join(map(str, lengths))}: {error}") from error


async def examine(
    endpoint: Endpoint,
    asked: Sequence[tuple[int, Question]],
    concurrency: int,
    timeout: float,
    progress: Callable[[], None],
) -> list[Marked]:
    """The answers, in the order of the questions. Raises StartupError, quoting it, for a request that fails."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=timeout, headers=endpoint.headers(), trust_env=False) as client:

        async def one(length: int, question: Question) -> Marked:
            async with gate:
                answer = await _complete(client, endpoint, question.prompt)
            progress()
            return Marked(length, question, answer)

        return await asyncio.gather(*(one(length, question) for length, question in asked))


async def _complete(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str) -> str:
    fields = {"model": endpoint.model, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
    try:
        response = await client.post(f"{endpoint.base_url}/v1/completions", json={**fields, **endpoint.extra_body})
        if response.status_code != 200:
            raise StartupError(f"{endpoint.base_url}: HTTP {response.status_code}: {error_message(response.text)}")
        return str(response.json()["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise StartupError(f"{endpoint.base_url} gave no answer: {error or type(error).__name__}") from error
