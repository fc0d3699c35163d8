"""Clients that ask all the time, some of whom leave early, and what became of each request."""

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.asking import Job, complete, greedy, random_prompts

SECONDS = float(os.environ.get("HISPARSE_PD_CHAOS_SECONDS", "20"))
SEED = int(os.environ.get("HISPARSE_PD_CHAOS_SEED", random.randrange(1_000_000)))
MOST_TOKENS = 40
CLEAN_STATUS = (429, 500, 503, 504)
BUG = "internal error"
"""An error of the service's own making, and never clean. Those of nodes are in their logs."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its exact continuation."""

    ids: Sequence[int]
    answer: Sequence[int]


def prompts_with_answers(reference: Any, lengths: Sequence[int], seed: int) -> list[Prompt]:
    return [Prompt(ids, reference.generate(ids, MOST_TOKENS)) for ids in random_prompts(lengths, seed)]


def assert_as_before(url: str, prompts: Sequence[Prompt]) -> None:
    """Once nothing goes wrong any more, every prompt gets its answer."""
    answers = complete(url, [Job(prompt.ids, MOST_TOKENS) for prompt in prompts], concurrency=4)
    assert answers == [list(prompt.answer) for prompt in prompts]


@dataclass(frozen=True)
class Asked:
    """A request: it stays to the end, leaves after some tokens, or leaves after some seconds.

    salt: of the prefix cache; with one of its own it finds nothing there.
    """

    prompt: Prompt
    max_tokens: int
    leave_after_tokens: int | None = None
    leave_after_s: float | None = None
    salt: str | None = None


@dataclass(frozen=True)
class Ended:
    """How a request ended. `problem`: why that must not be; None if it may."""

    asked: Asked
    kind: str
    seconds: float
    problem: str | None = None
    at: float = 0.0
    """When it ended (time.time)."""


class _LeftError(Exception):
    """The client has had enough."""


class Clients:
    """Keep `concurrency` requests going meanwhile, and then see each of them end.

    patience: seconds in which every request must have ended in one way or another.
    """

    def __init__(self, url: str, prompts: Sequence[Prompt], rng: random.Random, concurrency: int, patience: float):
        self.ended: list[Ended] = []
        self._url = url
        self._prompts = prompts
        self._rng = rng
        self._concurrency = concurrency
        self._patience = patience
        self._stopping = False

    def run(self) -> None:

        async def run_all() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=self._patience, limits=limits) as client:
                await asyncio.gather(*(self._ask_on(client) for _ in range(self._concurrency)))

        asyncio.run(run_all())

    @contextmanager
    def asking(self, notes: Sequence[str]) -> Iterator[None]:
        """They ask meanwhile. Then nothing has become of a request that may not be. notes: printed at the end."""
        print(f"HISPARSE_PD_CHAOS_SEED={SEED} HISPARSE_PD_CHAOS_SECONDS={SECONDS:g}")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run)
            try:
                yield
            finally:
                self._stopping = True
                print("\n".join(notes))
            running.result(timeout=self._patience + 10)
        print(self.summary())
        assert [ended for ended in self.ended if ended.problem is not None] == []

    @property
    def exact(self) -> int:
        """How many requests were answered as they should be."""
        return sum(ended.kind == "exact" for ended in self.ended)

    def summary(self) -> str:
        kinds = Counter(re.sub(r" \(request \S+\)", "", ended.kind) for ended in self.ended)
        slowest = max((ended.seconds for ended in self.ended), default=0.0)
        counts = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
        return f"{len(self.ended)} requests, the slowest took {slowest:.1f} s; {counts}"

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._stopping:
            ended = await ask(client, self._url, self._draw(), self._patience)
            self.ended.append(ended)
            if ended.kind.startswith("error"):
                # Whoever is refused tries again a little later.
                await asyncio.sleep(self._rng.uniform(0.2, 1.0))

    def _draw(self) -> Asked:
        rng = self._rng
        # Short ones more often: many transfers say more than long ones.
        [prompt] = rng.choices(self._prompts, [len(prompt.ids) ** -0.3 for prompt in self._prompts])
        max_tokens = rng.choice((1, 4, 16, len(prompt.answer)))
        salt = rng.choice((None, f"{rng.random()}"))
        match rng.choices(("stays", "leaves at once", "leaves later", "leaves after tokens"), (5, 1, 3, 1))[0]:
            case "leaves at once":
                return Asked(prompt, max_tokens, leave_after_s=0.01, salt=salt)
            case "leaves later":
                return Asked(prompt, max_tokens, leave_after_s=rng.uniform(0.05, 2.0), salt=salt)
            case "leaves after tokens":
                return Asked(prompt, max_tokens, leave_after_tokens=rng.randint(1, max_tokens), salt=salt)
        return Asked(prompt, max_tokens, salt=salt)


async def ask(client: httpx.AsyncClient, url: str, asked: Asked, patience: float) -> Ended:
    """Make a request and see how it ends: it never raises."""
    started = time.monotonic()

    def ended(kind: str, problem: str | None = None) -> Ended:
        return Ended(asked, kind, time.monotonic() - started, problem, time.time())

    leaves_after = asked.leave_after_s
    try:
        kind = await asyncio.wait_for(_stream(client, url, asked), patience if leaves_after is None else leaves_after)
    except TimeoutError:
        return ended("left") if leaves_after is not None else ended("stuck", f"no end within {patience:g} s")
    except _LeftError:
        return ended("left")
    except _WrongError as error:
        return ended("wrong", str(error))
    except httpx.TransportError as error:
        return ended("broken", f"{type(error).__name__}: {error}")
    problem = f"a bug: {kind}" if BUG in kind else None
    return ended(kind, problem)


class _WrongError(Exception):
    """An answer that may not be."""


async def _stream(client: httpx.AsyncClient, url: str, asked: Asked) -> str:
    """What kind of end the request came to: "exact", or an error in words. Raises _WrongError and _LeftError."""
    body = greedy(asked.prompt.ids, asked.max_tokens, stream=True, cache_salt=asked.salt)
    expected = list(asked.prompt.answer[: asked.max_tokens])
    ids: list[int] = []
    finished = False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            return _refused(response.status_code, (await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return f"error event: {event['error']['message']}"
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
                finished = finished or choice["finish_reason"] is not None
            if ids != expected[: len(ids)]:
                raise _WrongError(f"{len(asked.prompt.ids)} tokens in: {ids} is not how {expected} begins")
            if asked.leave_after_tokens is not None and len(ids) >= asked.leave_after_tokens and not finished:
                raise _LeftError
    if not finished or ids != expected:
        raise _WrongError(f"the stream ended after {len(ids)} of {len(expected)} tokens without an error")
    return "exact"


def _refused(status: int, body: str) -> str:
    if status not in CLEAN_STATUS:
        raise _WrongError(f"HTTP {status}: {body[:300]}")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError) as error:
        raise _WrongError(f"HTTP {status} without an error object: {body[:300]}") from error
    return f"error {status}: {message}"
