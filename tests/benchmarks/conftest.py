"""Services that say what they are told to."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

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
