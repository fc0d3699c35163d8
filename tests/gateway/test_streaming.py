"""A stream whose client is now slow and now fast gets every event once and in order, whichever way it goes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from gateway.answers.streamed import Json, StreamedAnswer
from gateway.attempt import Attempt, Delta, DeltaSink
from gateway.streaming import EventStream
from tests.gateway.fakes import held_answers
from tests.gateway.test_attempt import NODE, REQUEST, read, run, say


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
        attempt = Attempt(REQUEST, NODE, 0.0, read, held_answers().account(), sink)
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
        say(attempt, 18, 0)
        await serving
        text = b"".join(chunks.written).decode()
        assert text == "".join(f'data: {{"text":"[{number}]"}}\n\n' for number in (*range(10, 19), 0))
        assert chunks.ways == ["long", "long", "short", "short", "long", "long", "short", "long"]
        assert sent == ["http.response.start", "http.response.body"]

    run(test)
