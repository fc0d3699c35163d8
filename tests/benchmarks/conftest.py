"""Services that say what they are told to."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.serving.stub import Answer, Reply, serve, token_event, usage_event

Json = dict[str, Any]


async def in_full(request: Json, reply: Reply) -> None:
    """As many tokens as were asked for."""
    reply.start()
    for _ in range(request["max_tokens"]):
        reply.event(token_event())
    reply.event(usage_event(len(request["prompt"]), request["max_tokens"]))
    reply.event("[DONE]")
    reply.end()


@pytest.fixture
def stub() -> Iterator[Callable[[Answer], str]]:
    """A function that runs a stub with an answer of its own and returns its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(answer: Answer = in_full) -> str:
        server = asyncio.run_coroutine_threadsafe(serve(answer), loop).result()
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
