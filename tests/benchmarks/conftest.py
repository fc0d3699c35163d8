"""Services that say what they are told to."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from base.block_hashes import block_hashes
from benchmarks.prefix.policies import IdealCache
from benchmarks.serving.stub import Answer, Reply, serve, token_event, usage_event
from cli.main import main
from tests.e2e.cluster import children_of

Json = dict[str, Any]


async def in_full(request: Json, reply: Reply) -> None:
    """As many tokens as were asked for."""
    reply.start()
    for _ in range(request["max_tokens"]):
        reply.event(token_event())
    reply.event(usage_event(len(request["prompt"]), request["max_tokens"]))
    reply.event("[DONE]")
    reply.end()


def bench(directory: Path, *words: str, code: int = 0) -> Json:
    """Run `hisparse-pd bench serving` in this process; what it wrote."""
    files = ["--json", str(directory / "out.json"), "--png", str(directory / "out.png")]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serving", *words, *files])
    assert ended.value.code == code
    assert (directory / "out.png").read_bytes().startswith(b"\x89PNG")
    content: Json = json.loads((directory / "out.json").read_text())
    return content


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which `hisparse-pd bench` refuses these words."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """The command, until the end of the context: what still runs of it then, and below it, is killed."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        below = children_of(process)
        process.kill()
        process.wait()
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()


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


class CachingStub:
    """asked: what it was asked, in order. answers: the token ids of its answers."""

    def __init__(self) -> None:
        self.asked: list[Json] = []
        self.answers: list[list[int]] = []
        self._cache = IdealCache()

    async def answer(self, request: Json, reply: Reply) -> None:
        prompt, first = request["prompt"], 7 * len(self.asked)
        token_ids = [(first + number) % 256 for number in range(request["max_tokens"])]
        self.asked.append(request)
        self.answers.append(token_ids)
        cached = self._cache.find(blocks(prompt))
        self._cache.add(blocks([*prompt, *token_ids[:-1]]))
        reply.start()
        for token_id in token_ids:
            reply.event(token_event(token_ids=[token_id]))
        reply.event(usage_event(len(prompt), len(token_ids), cached))
        reply.event("[DONE]")
        reply.end()


def blocks(token_ids: list[int]) -> list[int]:
    return list(block_hashes(np.array(token_ids, dtype=np.int32)).tolist())
