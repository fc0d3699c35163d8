"""Clients of a service: they ask, and compare the answers with those of a reference."""

import asyncio
import json
import operator
import random
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from base.block_hashes import BLOCK_TOKENS
from tests.e2e.cluster import wait_until


@dataclass(frozen=True)
class Job:
    """One greedy completion; `abort_after` is the number of streamed tokens after which the client leaves."""

    prompt_ids: Sequence[int]
    max_tokens: int
    abort_after: int | None = None


def greedy(prompt: Sequence[int], max_tokens: int, **fields: object) -> dict[str, Any]:
    """The body of a request for exactly so many tokens, and their ids."""
    exact = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, **exact, **fields}


def ask(url: str, prompt: Sequence[int], max_tokens: int, **fields: object) -> dict[str, Any]:
    """The whole answer to a request that is not streamed."""
    body = greedy(prompt, max_tokens, **fields)
    answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    return answer


def ids_of(answer: dict[str, Any]) -> list[int]:
    """The token ids of an answer's first choice."""
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def ids_in(line: str) -> list[int]:
    """The token ids of a line of a stream. AssertionError if it is an error."""
    if not line.startswith("data: {"):
        return []
    event = json.loads(line.removeprefix("data: "))
    assert "error" not in event, event
    return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or []]


@contextmanager
def streamed(url: str, prompt: Sequence[int], max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream, while they come."""
    body = greedy(prompt, max_tokens, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        yield response.iter_lines()


async def _run_job(client: httpx.AsyncClient, url: str, job: Job) -> list[int]:
    body = greedy(job.prompt_ids, job.max_tokens, stream=True)
    ids: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise AssertionError((await response.aread()).decode())
        if job.abort_after == 0:
            return ids
        async for line in response.aiter_lines():
            ids += ids_in(line)
            if job.abort_after is not None and len(ids) >= job.abort_after:
                return ids
    return ids


def complete(url: str, jobs: Sequence[Job], concurrency: int = 1) -> list[list[int]]:
    """Run the jobs, so many at a time, and return the token ids that each streamed."""

    async def run_all() -> list[list[int]]:
        gate = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:

            async def one(job: Job) -> list[int]:
                async with gate:
                    return await _run_job(client, url, job)

            return await asyncio.gather(*(one(job) for job in jobs))

    return asyncio.run(run_all())


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def whole_blocks(tokens: int) -> int:
    """Tokens of whole blocks: what of a sequence may be cached."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


class Oracle(Protocol):
    """What says which tokens are right."""

    def likeliest(self, prompt_ids: Sequence[int], answer: Sequence[int]) -> list[int]: ...


def assert_exact(url: str, reference: Oracle, jobs: Sequence[Job], concurrency: int = 1) -> None:
    """Every client that stays gets what the reference would generate; one that leaves, the beginning of it."""
    for job, answer in zip(jobs, complete(url, jobs, concurrency), strict=True):
        assert answer == reference.likeliest(job.prompt_ids, answer), f"prompt of {len(job.prompt_ids)} tokens"
        assert len(answer) == job.max_tokens or job.abort_after is not None


class Load:
    """Clients that ask one thing after another; each answer is compared with the reference."""

    def __init__(self, urls: Sequence[str], reference: Oracle, jobs: Sequence[Job]) -> None:
        """urls: of gateways, which take turns. What changes in it counts from the next request on."""
        self._urls, self._reference, self._jobs = urls, reference, jobs
        self._answers: list[int] = []
        """Of each client."""
        self._over = threading.Event()

    def wait_for_more(self, count: int) -> None:
        enough = sum(self._answers) + count
        wait_until(lambda: sum(self._answers) >= enough, timeout=120, what="more answers")

    def wait_for_each(self) -> None:
        """Until what is under way was asked after this call."""
        before = list(self._answers)
        wait_until(lambda: all(map(operator.gt, self._answers, before)), timeout=120, what="an answer to each")

    @contextmanager
    def running(self, clients: int) -> Iterator["Load"]:
        """So many are at work meanwhile. AssertionError if one of them saw an error or a wrong token."""
        self._answers = [0] * clients
        with ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(self._run, number) for number in range(clients)]
            try:
                yield self
            finally:
                self._over.set()
            for one in running:
                one.result()

    def _run(self, client: int) -> None:
        while not self._over.is_set():
            number = client + self._answers[client]
            url, job = self._urls[number % len(self._urls)], self._jobs[number % len(self._jobs)]
            assert_exact(url, self._reference, [job])
            self._answers[client] += 1


def leave_when(condition: Callable[[], Any], url: str, body: Mapping[str, Any]) -> None:
    """Ask for a completion that is not streamed, and leave once the condition holds, before there is an answer."""
    with closing(HTTPConnection(urlsplit(url).netloc)) as client:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(condition)
        answered, _, _ = select.select([client.sock], [], [], 0)
        assert not answered, client.getresponse().read()
