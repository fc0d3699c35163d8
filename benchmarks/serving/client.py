"""Sends a request and notes when what arrives.

aiohttp rather than httpx: it takes a fourth of the time per event, and a client must not be what it measures.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from benchmarks.serving.answer import Answer, Arrival, EventReader, StreamFailed, Usage
from benchmarks.serving.workload import Prompt

_IDLE_S = 2.0
"""Servers close connections that idle for longer; one must not be about to when the next request takes it."""
_ERROR_CHARS = 400


@dataclass(frozen=True)
class Request:
    """A request, and what it asks for. input_tokens, token_ids of the prompt: None where only the service knows."""

    body: bytes = field(repr=False)
    input_tokens: int | None
    output_tokens: int
    token_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible API.

    base_url: without /v1. extra_body: further fields of each request. process_id: of the process that started all
    others of the service, where that was here.
    """

    label: str
    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    process_id: int | None = None

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def request(self, prompt: Prompt) -> Request:
        """Asks for a completion of exactly so many tokens."""
        fields = {
            "model": self.model,
            "prompt": prompt.content,
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps({**fields, **self.extra_body}).encode()
        token_ids = None if isinstance(prompt.content, str) else np.array(prompt.content, dtype=np.int32)
        return Request(body, prompt.input_tokens, prompt.output_tokens, token_ids)


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer. kind: what failures are counted by."""

    kind: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """What became of one request: what came when, in seconds on the client's clock.

    token_ids: of the answer, as far as the service says them.
    """

    request: Request
    started: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    usage: Usage | None = None
    failure: Failure | None = None
    token_ids: tuple[int, ...] = field(default=(), repr=False)


class Client:
    """Sends requests to one endpoint, over as many connections as are under way. Async context manager."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        """timeout: seconds for a whole request; infinity for no limit."""
        self._url = f"{endpoint.base_url}/v1/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=timeout if math.isfinite(timeout) else None),
            headers={"Content-Type": "application/json", **endpoint.headers()},
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: Request) -> Outcome:
        """Send and read the answer to its end. A request that fails is an outcome too."""
        answer, failure = Answer(), None
        started = time.perf_counter()
        try:
            async with self._session.post(self._url, data=request.body) as response:
                await _read(response, answer)
        except StreamFailed as error:
            failure = Failure(error.kind, str(error))
        except TimeoutError:
            failure = Failure("timeout", f"no complete answer within {self._session.timeout.total:g} s")
        except aiohttp.ClientConnectorError as error:
            failure = Failure("no connection", str(error))
        except aiohttp.ClientError as error:
            failure = Failure("broken connection", str(error) or type(error).__name__)
        ended = time.perf_counter()
        arrivals, token_ids = tuple(answer.arrivals), tuple(answer.token_ids)
        return Outcome(request, started, ended, arrivals, answer.usage, failure, token_ids)


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Take the whole answer. Raises StreamFailed where there is none or it breaks off."""
    if response.status != 200:
        raise StreamFailed(f"HTTP {response.status}", error_message(await response.text(errors="replace")))
    events = EventReader()
    async for data in response.content.iter_any():
        now = time.perf_counter()
        for event in events.feed(data):
            answer.take(now, event)
    if not answer.done:
        raise StreamFailed("broken off", "the stream ended without [DONE]")
    if not answer.arrivals:
        raise StreamFailed("no tokens", "the answer has no tokens")


def error_message(body: str) -> str:
    """The message of an OpenAI error object, or the beginning of what came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()[:_ERROR_CHARS] or "no reason given"
