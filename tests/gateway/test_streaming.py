"""Which way deltas go to a connection: to the sink while the reader of the answer waits, else through it, in order."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from control.messages import FinishReason, Generate, Output, Peer, Token
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.attempt import Attempt, Delta, DeltaSink
from gateway.generation import Generation, GenerationLimits, TokenizedRequest
from gateway.streaming import EventStream
from tests.gateway.world import held_answers

REQUEST = TokenizedRequest(
    Generate(request_id="r", prompt_ids=(1,), max_new_tokens=99), streams=True, arrived=0.0, deadline=9e9
)
NODE = Peer(role="decode", address="127.0.0.1:1", boot_id="boot")


def read(output: Output) -> Delta:
    """Token 0 ends the answer; token 1 breaks the reader."""
    ids = [token.token_id for token in output.tokens]
    if 1 in ids:
        raise ValueError("broken")
    return Delta(str(ids), output.tokens, (), "stop" if 0 in ids else output.finish_reason)


def attempt_with(sink: DeltaSink) -> Attempt:
    generation = Generation(REQUEST, GenerationLimits(migrations=3, token_timeout=9e9))
    return Attempt(generation, generation.placed(), NODE, 0.0, read, held_answers().account(), sink)


def say(attempt: Attempt, *ids: int, ends: FinishReason | None = None) -> None:
    """One message for each token."""
    for token_id in ids:
        token = Token(token_id=token_id)
        attempt.deliver(Output(request_id="r", start=attempt.received, tokens=(token,), finish_reason=ends), 0.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


def test_an_answer_that_cannot_be_read_fails_behind_what_could() -> None:
    async def test() -> None:
        attempt = attempt_with(DeltaSink())
        say(attempt, 7, 1)
        assert [delta.text for delta in await attempt.next()] == ["[7]"]
        with pytest.raises(ValueError, match="broken"):
            await attempt.next()

    run(test)


class TextAnswer(StreamedAnswer):
    """Its events are the texts of its deltas."""

    def __init__(self) -> None:
        pass

    def keep(self, index: int, delta: Delta) -> None:
        raise AssertionError("this answer streams")

    def whole(self) -> Json:
        raise AssertionError("this answer streams")

    def begin(self) -> list[Json]:
        return []

    def delta_events(self, index: int, delta: Delta) -> list[Json]:
        return [{"text": delta.text}]

    def end(self) -> list[Json]:
        return []

    def failed(self, error: Exception) -> list[Json]:
        return [{"failed": str(error)}]


class Chunks:
    """A connection's chunks. ways: by which way each came."""

    open = True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ways: list[str] = []
        self.fast = asyncio.Event()
        self.fast.set()

    @property
    def paused(self) -> bool:
        return not self.fast.is_set()

    async def write(self, body: bytes) -> None:
        await self.fast.wait()
        self.written.append(body)
        self.ways.append("long")

    def write_soon(self, body: bytes) -> None:
        assert not self.paused
        self.written.append(body)
        self.ways.append("short")


async def deltas_of(attempt: Attempt) -> AsyncGenerator[tuple[int, Sequence[Delta]], None]:
    ended = False
    while not ended:
        deltas = await attempt.next()
        yield 0, deltas
        ended = deltas[-1].finish_reason is not None


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_events_come_once_and_in_order_whatever_the_client_does() -> None:
    async def test() -> None:
        sink, chunks, sent = DeltaSink(), Chunks(), []
        attempt = attempt_with(sink)
        say(attempt, 10)
        deltas = deltas_of(attempt)
        stream = EventStream(TextAnswer(), "r", await anext(deltas), deltas, sink)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        say(attempt, 11)
        serving = asyncio.create_task(stream({"type": "http", "chunks": chunks}, receive, send))
        await settle()
        say(attempt, 12, 13)
        chunks.fast.clear()
        say(attempt, 14, 15)
        await settle()
        say(attempt, 16)
        await settle()
        chunks.fast.set()
        say(attempt, 17)
        await settle()
        say(attempt, 18, 0, 19)
        await serving
        text = b"".join(chunks.written).decode()
        assert text == "".join(f'data: {{"text":"[{number}]"}}\n\n' for number in (*range(10, 19), 0))
        assert chunks.ways == ["long", "long", "short", "short", "long", "long", "short", "long"]
        assert sent == ["http.response.start", "http.response.body"]

    run(test)
