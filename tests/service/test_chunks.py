"""Chunks that go past the ASGI application to the transport."""

import asyncio
from typing import Any

from service.connection import ChunkTurns, ChunkWriter


class Client:
    """The transport and the flow of a connection."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.left = self.write_paused = False
        self.resumed = asyncio.Event()
        self.chunks = ChunkWriter(self, self, ChunkTurns())  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.left

    async def drain(self) -> None:
        await self.resumed.wait()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_what_comes_in_one_turn_of_the_loop_is_one_write() -> None:
    async def test() -> None:
        client = Client()
        client.chunks.write_soon(b"ab")
        client.chunks.write_soon(b"c")
        assert client.written == []
        await asyncio.sleep(0)
        assert client.written == [b"3\r\nabc\r\n"]
        client.chunks.write_soon(b"d")
        await client.chunks.write(b"e")
        await asyncio.sleep(0)
        assert client.written[1:] == [b"2\r\nde\r\n"]

    run(test())


def test_a_slow_client_is_waited_for() -> None:
    async def test() -> None:
        client = Client()
        client.write_paused = True
        assert client.chunks.paused
        writing = asyncio.create_task(client.chunks.write(b"a"))
        await asyncio.sleep(0)
        assert client.written == []
        client.write_paused = False
        client.resumed.set()
        await writing
        await asyncio.sleep(0)
        assert client.written == [b"1\r\na\r\n"]

    run(test())
