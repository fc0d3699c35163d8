"""`hisparse-pd quarantine` against a status page with a node's loop behind it."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import APIRouter

from base.metrics import Metrics
from cli.main import main
from cli.serve import free_port
from control.messages import AttemptId, Peer
from decode_node.quarantine import LoopCall, quarantine_router
from service.status import StatusServer, bind_http
from tests.decode_node.remote_world import RemoteWorld
from tests.prefill_node.fakes import FakeControl
from transfer.fencing import ReservationTable

WRITER = Peer(role="prefill", address="10.0.0.1:8011", boot_id="0123456789abcdef")
Refused = Callable[..., str]


@dataclass
class Node:
    url: str
    table: ReservationTable[AttemptId, Peer, Any]
    control: FakeControl


@pytest.fixture
def node() -> Iterator[Node]:
    """A decode node as far as the command sees it: HTTP, and a loop that owns the reservations."""
    world = RemoteWorld()
    inbox: queue.SimpleQueue[LoopCall | None] = queue.SimpleQueue()

    def loop() -> None:
        while (call := inbox.get()) is not None:
            call.run()

    thread = threading.Thread(target=loop)
    thread.start()
    listener = bind_http("127.0.0.1", 0)
    router = quarantine_router(world.remote.quarantine, inbox.put)
    server = StatusServer(listener, APIRouter(), router, refused=Metrics().http_refused)
    server.start()
    yield Node(f"http://127.0.0.1:{listener.getsockname()[1]}", world.table, world.control)
    server.stop()
    inbox.put(None)
    thread.join()


@pytest.fixture
def quarantined(node: Node) -> Node:
    node.table.open(AttemptId("decode", "cmpl-1", 3), WRITER, "slots", num_slots=640)
    node.table.quarantine(AttemptId("decode", "cmpl-1", 3), time.monotonic() - 60)
    return node


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quarantine", *words])
    assert ended.value.code == 0


def test_list(quarantined: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run("list", "--url", quarantined.url + "/")
    output = capsys.readouterr().out
    for expected in ("640 slots in quarantine", "cmpl-1", "10.0.0.1:8011", "0123456789abcdef", "60.", "unknown"):
        assert expected in output


def test_evict(quarantined: Node, capsys: pytest.CaptureFixture[str]) -> None:
    run("evict", WRITER.boot_id, "--url", quarantined.url)
    assert "640 slots of 1 reservations will be free in " in capsys.readouterr().out
    assert [writer.may_post for r in quarantined.table for writer in r.writers] == [False]


def test_evict_refuses_a_live_writer_unless_forced(quarantined: Node, refused: Refused) -> None:
    quarantined.control.heard[WRITER.boot_id] = time.monotonic()
    error = refused("quarantine", "evict", WRITER.boot_id, "--url", quarantined.url)
    assert error.startswith("error: 10.0.0.1:8011 (boot id 0123456789abcdef) was heard ")
    assert [writer.may_post for r in quarantined.table for writer in r.writers] == [True]
    run("evict", WRITER.boot_id, "--url", quarantined.url, "--force")


@pytest.mark.parametrize("command", [["list"], ["evict", "x"]])
@pytest.mark.parametrize("url", ["closed port", "127.0.0.1:8020", "http://", "ftp://127.0.0.1"])
def test_what_cannot_be_reached_is_one_line_and_2(command: list[str], url: str, refused: Refused) -> None:
    url = f"http://127.0.0.1:{free_port()}" if url == "closed port" else url
    assert refused("quarantine", *command, "--url", url).startswith(f"error: cannot reach {url}: ")


def test_another_process_is_not_a_decode_node(refused: Refused) -> None:
    router = APIRouter()

    @router.post("/quarantine/evict")
    def evict() -> str:
        return "something else"

    listener = bind_http("127.0.0.1", 0)
    server = StatusServer(listener, router, refused=Metrics().http_refused)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    error = refused("quarantine", "list", "--url", url)
    assert error == f"error: {url} answers /quarantine with 404; is it a decode node?"
    error = refused("quarantine", "evict", "x", "--url", url)
    assert error == f"error: {url} does not answer /quarantine/evict as a decode node does"
    server.stop()
