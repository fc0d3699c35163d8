"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")
_AHEAD = 16
"""What streams may be ahead of whoever reads."""


async def merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """What the streams yield, as it comes, with the index of the stream.

    The first error of any stream ends all; so does closing this one early. Then all streams are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for element in only:
                yield 0, element
        return
    ready: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue(_AHEAD)

    async def read(index: int, stream: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(stream):
                async for element in stream:
                    await ready.put((index, element))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    reading = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            match await ready.get():
                case None:
                    open_streams -= 1
                case Exception() as error:
                    raise error
                case (index, element):
                    yield index, element
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
