"""What an operator sees of the quarantine and can do about it."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from control.messages import AttemptId, Peer
from decode_node.prefill_nodes import SILENCE_S
from decode_node.quarantine import LoopCall, on_loop, quarantine_router
from tests.decode_node.remote_world import RemoteWorld
from transfer.fencing import DRAIN_GRACE_S, ReservationTable

GONE = Peer(role="prefill", address="10.0.0.1:1", boot_id="gone")
ALIVE = Peer(role="prefill", address="10.0.0.2:1", boot_id="alive")


class Harness:
    """Two requests given up that GONE was writing, one that ALIVE was, and one that is still wanted of each."""

    def __init__(self) -> None:
        world = RemoteWorld()
        self.freed: list[Any] = world.freed
        self.table: ReservationTable[AttemptId, Peer, Any] = world.table
        self.control = world.control
        self.quarantine = world.remote.quarantine
        self.now = time.monotonic()
        for name, writer in (("a", GONE), ("b", GONE), ("c", ALIVE), ("wanted-1", GONE), ("wanted-2", ALIVE)):
            self.table.open(AttemptId("decode", name, 1), writer, name, num_slots=8)
        for age, name in enumerate("abc"):
            self.table.quarantine(AttemptId("decode", name, 1), self.now - 100 + age)
        self.control.heard["alive"] = self.now - 1
        self.control.heard["gone"] = self.now - 50

    def expire(self) -> list[Any]:
        self.table.release_expired(time.monotonic() + DRAIN_GRACE_S)
        return self.freed


@pytest.fixture
def h() -> Harness:
    return Harness()


def test_the_list_says_who_holds_what_and_for_how_long(h: Harness) -> None:
    found = h.quarantine.list().reservations
    assert [(r.request_id, r.epoch, r.slots, r.writer, r.boot_id) for r in found] == [
        ("a", 1, 8, "10.0.0.1:1", "gone"),
        ("b", 1, 8, "10.0.0.1:1", "gone"),
        ("c", 1, 8, "10.0.0.2:1", "alive"),
    ]
    assert [r.quarantined_s for r in found] == [pytest.approx(s, abs=2) for s in (100, 99, 98)]
    assert [r.last_heard_s for r in found] == [pytest.approx(s, abs=2) for s in (50, 50, 1)]
    assert [r.free_in_s for r in found] == [None, None, None]
    del h.control.heard["gone"]
    assert h.quarantine.list().reservations[0].last_heard_s is None


def test_evicted_slots_are_free_after_the_grace_and_not_before(h: Harness) -> None:
    eviction = h.quarantine.evict("gone")
    assert (eviction.reservations, eviction.slots) == (2, 16)
    assert eviction.free_in_s == pytest.approx(DRAIN_GRACE_S, abs=0.5)
    assert "corrupts" in eviction.warning
    assert h.quarantine.list().reservations[0].free_in_s == pytest.approx(DRAIN_GRACE_S, abs=0.5)
    h.table.release_expired(time.monotonic())
    assert h.freed == []
    assert h.expire() == ["a", "b"], "neither another node's nor what is still wanted"
    with pytest.raises(HTTPException, match="boot id gone"):
        h.quarantine.evict("gone")


def test_eviction_refuses_a_live_writer(h: Harness) -> None:
    with pytest.raises(HTTPException, match=r"heard 1\.\d s ago.*corrupts"):
        h.quarantine.evict("alive")
    assert h.expire() == []
    h.control.heard["alive"] = time.monotonic() - SILENCE_S - 0.1
    assert h.quarantine.evict("alive").reservations == 1


def test_evicting_twice_does_not_start_the_grace_again(h: Harness) -> None:
    h.quarantine.evict("gone")
    for reservation in h.table.quarantined:
        [writer] = reservation.writers
        if writer.free_after is not None:
            writer.free_after -= 3
    assert h.quarantine.evict("gone").free_in_s == pytest.approx(DRAIN_GRACE_S - 3, abs=0.5)


def test_slots_of_several_writers_are_listed_and_evicted_for_each(h: Harness) -> None:
    rank = Peer(role="prefill", address="10.0.0.1:3", boot_id="rank")
    h.table.open(AttemptId("decode", "d", 1), GONE, "d", num_slots=5, ranks=(rank,))
    h.table.quarantine(AttemptId("decode", "d", 1), h.now)
    of_d = [r for r in h.quarantine.list().reservations if r.request_id == "d"]
    assert [(r.boot_id, r.writer, r.slots) for r in of_d] == [("gone", GONE.address, 5), ("rank", rank.address, 5)]
    assert h.quarantine.evict("gone").also_written_by == ["rank"]
    assert h.expire() == ["a", "b"]
    assert h.quarantine.evict("rank").also_written_by == []
    assert h.expire() == ["a", "b", "d"]


def client_of(h: Harness, post: Callable[[LoopCall], None], timeout: float = 10) -> TestClient:
    app = FastAPI()
    app.include_router(quarantine_router(h.quarantine, post, timeout))
    return TestClient(app)


@pytest.fixture
def client(h: Harness) -> Iterator[TestClient]:
    with client_of(h, lambda call: call.run()) as client:
        yield client


def test_http_lists(client: TestClient) -> None:
    reservations = client.get("/quarantine").json()["reservations"]
    assert [r["request_id"] for r in reservations] == ["a", "b", "c"]
    assert set(reservations[0]) == {
        "request_id",
        "epoch",
        "slots",
        "quarantined_s",
        "writer",
        "boot_id",
        "access",
        "last_heard_s",
        "free_in_s",
    }


def test_http_says_404_for_an_unknown_boot_and_409_for_a_live_one(client: TestClient, h: Harness) -> None:
    unknown = client.post("/quarantine/evict", params={"boot_id": "typo"})
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "nothing is in quarantine for boot id typo")
    alive = client.post("/quarantine/evict", params={"boot_id": "alive"})
    assert alive.status_code == 409
    assert "corrupts" in alive.json()["detail"]
    assert h.expire() == []
    forced = client.post("/quarantine/evict", params={"boot_id": "alive", "force": "true"})
    assert forced.status_code == 200
    assert h.expire() == ["c"]


def test_a_node_with_keys_asks_for_the_operators_token(h: Harness) -> None:
    app = FastAPI()
    app.include_router(quarantine_router(h.quarantine, lambda call: call.run(), token="the token"))
    with TestClient(app) as client:
        for shown in ({}, *({"Authorization": words} for words in ("Bearer another", "the token", "Bearer"))):
            for response in (
                client.get("/quarantine", headers=shown),
                client.post("/quarantine/evict", params={"boot_id": "gone"}, headers=shown),
            ):
                assert response.status_code == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert h.expire() == []
        evicted = client.post("/quarantine/evict?boot_id=gone", headers={"Authorization": "Bearer the token"})
        assert evicted.status_code == 200


def test_a_loop_that_does_not_answer_is_503_and_evicts_nothing_later(h: Harness) -> None:
    calls: list[LoopCall] = []
    with client_of(h, calls.append, timeout=0.01) as client:
        assert client.get("/quarantine").status_code == 503
        response = client.post("/quarantine/evict", params={"boot_id": "gone"})
    assert response.status_code == 503
    assert response.json()["detail"].endswith("nothing was evicted")
    for call in calls:
        call.run()
    assert h.expire() == []


def test_an_error_reaches_the_asker_and_not_the_loop() -> None:
    with pytest.raises(ZeroDivisionError):
        on_loop(lambda call: call.run(), lambda: 1 // 0, timeout=10)


def test_what_was_begun_in_time_is_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go.wait(10)
        return "done"

    def post(call: LoopCall) -> None:
        threading.Thread(target=call.run).start()
        assert begun.wait(10)
        threading.Timer(0.1, go.set).start()

    assert on_loop(post, slow, timeout=0.01) == "done"
