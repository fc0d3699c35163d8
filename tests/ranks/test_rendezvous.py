"""Ranks of two hosts, which share no memory and no line. Here both have the loopback interface."""

import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from base.errors import StartupError
from base.phase import Phase
from ranks import watch
from ranks.barrier import GroupBarrier
from ranks.executor import RankLine
from ranks.place import NO_LINE, RankPlace, create_places
from ranks.rendezvous import interface_of, local_address, meet
from ranks.sealed_socket import INHERITED, SealedSocket
from ranks.status import ReplicatedStatus
from tests.e2e.cluster import wait_until
from tests.ranks.ranks_harness import JSON, FakeWatch, forked, join

STEPS = 50


def test_places_of_a_host() -> None:
    """Ranks of host k are k * ranks_per_host and following; only those of host 0 inherit lines."""
    places = [create_places(4, True, 2, host, "10.0.0.1:5000") for host in range(2)]
    assert [[place.rank for place in each] for each in places] == [[0, 1], [2, 3]]
    assert [place.counterparts for each in places for place in each] == [[2], [3], [0], [1]]
    assert places[1][1].neighbours == range(2, 4)
    assert [line == NO_LINE for line in places[0][0].lines] == [False, True, True]
    assert places[1][0].lines == (NO_LINE,) * 3
    for each in places:
        assert -1 not in each[0].descriptors
        assert RankPlace.taken(each[1].variables()) == each[1]
        for descriptor in each[0].descriptors:
            os.close(descriptor)


class Linked:
    """Rank `rank` of two hosts with a rank each: its status, and what it was called for."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        [self.place] = create_places(2, hosts=2, host=rank, meeting="nowhere:1")
        self.called, self.lost = threading.Event(), threading.Event()
        self.status = ReplicatedStatus(
            self.place.status, 2, rank, {1 - rank: SealedSocket(link, INHERITED)}, self.called.set, self.lost.set
        )

    def barrier(self) -> GroupBarrier:
        return GroupBarrier(self.status, self.place.rank, self.place.wakeup_fds, FakeWatch(), 20)

    def close(self) -> None:
        self.status.leave()
        for descriptor in self.place.descriptors:
            os.close(descriptor)


@pytest.fixture
def pair() -> Iterator[tuple[Linked, Linked]]:
    first, second = (Linked(rank, link) for rank, link in enumerate(socket.socketpair()))
    yield first, second
    for each in (first, second):
        each.close()


def test_what_a_rank_writes_of_itself_is_in_the_table_of_the_other_host(pair: tuple[Linked, Linked]) -> None:
    first, second = pair
    first.status.post(0, 1, 7)
    assert second.called.wait(30), "it has not come to that round"
    assert second.status.posted(0, 1) == 7
    first.status.set_phase(0, Phase.DRAINING)
    wait_until(lambda: second.status.phase() is Phase.DRAINING, what="the phase")
    beats = second.status.beats(0)
    first.status.beat(0)
    wait_until(lambda: second.status.beats(0) > beats, what="the beat")
    assert not second.status.all_done()
    second.status.set_done(1)
    first.status.set_done(0)
    wait_until(second.status.all_done, what="both to be done")
    wait_until(first.status.all_done, what="both to be done")
    first.status.leave()
    second.status.leave()
    assert [first.lost.is_set(), second.lost.is_set()] == [False, False], "who leaves in peace is not missed"


def test_a_rank_whose_connection_ends_is_reported_with_the_reason(pair: tuple[Linked, Linked]) -> None:
    first, second = pair
    first.status.leave()  # without being done: as if it was killed
    assert second.lost.wait(30)
    assert second.status.reported(0) == ("rank 0 on host 0 closed its connection", 1)


def test_a_rank_that_is_silent_for_too_long_is_reported(pair: tuple[Linked, Linked]) -> None:
    """As if the cable was cut: nothing is closed."""
    first, second = pair
    second.status.be_patient(0.05)
    first.status.beat(0)  # the reader's wait of before ends with what comes next
    assert second.lost.wait(30)
    assert second.status.reported(0) == ("rank 0 on host 0 was not heard for 0.05 s", 1)


def test_ranks_of_two_hosts_compare_exchange_step_and_leave(tmp_path: Path) -> None:
    """Four ranks, two on each: as they do on one host. One without work sleeps until another host calls it."""

    def body(place: RankPlace) -> None:
        woken = threading.Event()
        group = join(place, wake=woken.set)
        group.check_same_config({"version": "1"})
        assert group.share_on_host(place.rank) == list(place.neighbours)
        exchange = group.connect()
        gathered = exchange.gather(torch.full((1, 2), float(place.rank)))
        assert gathered[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert exchange.reduce(gathered)[0].tolist() == [4.0 * place.rank] * 2
        heard: list[tuple[int, object]] = []
        for rank, connection in sorted(group.lines.items()):
            line = RankLine(connection, rank, JSON, lambda said, rank=rank: heard.append((rank, said)), group.fail)  # type: ignore[misc]
            line.send(f"from {place.rank}")
        wait_until(lambda: len(heard) == (1 if place.rank else 3), what="words over the lines")
        assert sorted(heard) == [(rank, f"from {rank}") for rank in ((0,) if place.rank else (1, 2, 3))]
        assert abs(group.clock_ahead) < 1, "one clock for all processes of a machine"
        group.watch_steps()
        steps = 0
        while steps < STEPS:
            if place.rank != 2 and not group.barrier.spin_before_sleep(lambda: False):
                woken.wait(5)
                woken.clear()
            if place.rank == 2 and steps == STEPS // 2:
                time.sleep(0.1)  # longer than others linger
            agreed = group.barrier.wait(3 + steps % 4 if place.rank == 2 else 0)
            assert agreed in (0, 3 + steps % 4)
            steps += bool(agreed)
        assert group.barrier.wait(0) == 0, "nobody has work any more"
        own = Phase.DRAINING if place.rank == 3 else Phase.SERVING
        wait_until(lambda: group.sync_phase(own) is Phase.DRAINING, what="rank 3 to drain")
        wait_until(group.done, what="all to be done")
        group.close()

    with forked(4, tmp_path, body, hosts=2, lines=True) as ranks:
        assert [ranks.wait(rank, 60) for rank in range(4)] == [0] * 4, [ranks.said(rank) for rank in range(4)]


def test_the_ranks_of_one_host_end_when_one_of_another_is_killed(tmp_path: Path) -> None:
    """Rank 0 has no connection to rank 3, and learns of its end from rank 1, which has one."""

    def body(place: RankPlace) -> None:
        group = join(place)
        group.watch_steps()
        for step in range(100_000):
            if place.rank == 3 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            group.barrier.wait(1)

    with forked(4, tmp_path, body, hosts=2) as ranks:
        assert [ranks.wait(rank) for rank in range(4)] == [1, 1, 1, -signal.SIGKILL]
        for rank in range(3):
            # Of several that end for the sake of one, the first that is seen is named.
            assert re.fullmatch(r"GroupFailed: rank \d ended", ranks.said(rank))
        assert ranks.status.first_reported([2, 3]) is not None


def test_a_rank_of_another_host_that_is_stopped_in_peace_is_named(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        group = join(place, step_timeout=1.0)
        group.watch_steps()
        group.share(None)
        if place.rank == 1:
            beats = group._status.beats(1)
            wait_until(lambda: group._status.beats(1) > beats + 1, what="a beat that ends the patience of the start")
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(lambda: group.barrier.wait(0), what="a rank to end")

    with forked(2, tmp_path, body, hosts=2) as ranks:
        assert ranks.wait(0) == 1
        assert ranks.said(0) == "GroupFailed: rank 1 ended"
        assert ranks.status.reported(1) == ("rank 1 on host 1 was not heard for 1 s", 1)


def test_a_rank_that_ends_while_the_group_starts_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the store, for as long as weights may take to load."""
    monkeypatch.setattr(watch, "_STARTING_S", 0.1)

    def body(place: RankPlace) -> None:
        group = join(place)
        if place.rank == 1:
            os._exit(3)
        group.share(None)

    with forked(2, tmp_path, body, hosts=2) as ranks:
        assert [ranks.wait(rank) for rank in range(2)] == [1, 3]
        assert ranks.status.reported(0) == ("rank 1 ended while the group started", 1)
        # Reset, if what the other side had sent was not read yet.
        ends = ("closed its connection", "lost its connection (Connection reset by peer)")
        assert ranks.status.reported(1) in [(f"rank 1 on host 1 {end}", 1) for end in ends]


def test_hosts_that_have_other_keys_do_not_meet(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        join(place, secret=bytes([place.rank]), patience=1.0 if place.rank == 0 else 30.0)

    with forked(2, tmp_path, body, hosts=2) as ranks:
        assert [ranks.wait(rank) for rank in range(2)] == [1, 1]
        assert re.match(
            r"StartupError: rank 1 did not get a session with rank 0 at 127\.0\.0\.1:\d+: it has another key, or",
            ranks.said(1),
        )
        assert ranks.said(0).startswith("GroupFailed: rank 0 did not find its group at 127.0.0.1:")


def test_strangers_that_say_nothing_keep_no_rank_waiting(tmp_path: Path) -> None:
    """A rank gives up after as long as a stranger may take."""
    have_come = tmp_path / "come"

    def body(place: RankPlace) -> None:
        if place.rank == 1:
            wait_until(have_come.exists, what="the strangers")
        join(place, secret=b"secret", patience=60)

    with forked(2, tmp_path, body, hosts=2) as ranks:
        host, _, port = ranks.places[0].meeting.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        strangers = [socket.create_connection(tuple(json.loads(store.get("at/0")))) for _ in range(3)]
        have_come.touch()
        assert [ranks.wait(rank, 60) for rank in range(2)] == [0, 0], [ranks.said(rank) for rank in range(2)]
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_is_led_to_another_address_gets_no_session(tmp_path: Path) -> None:
    """Somebody writes to the store, which asks for no key, and passes on what the ranks say."""
    is_led = tmp_path / "led"

    def body(place: RankPlace) -> None:
        if place.rank == 1:
            wait_until(is_led.exists, what="the store to say the other address")
        join(place, secret=b"secret", patience=20)

    with forked(2, tmp_path, body, hosts=2) as ranks, socket.create_server(("127.0.0.1", 0)) as between:
        host, _, port = ranks.places[0].meeting.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        at = tuple(json.loads(store.get("at/0")))
        store.set("at/0", json.dumps(between.getsockname()))
        threading.Thread(target=relay, args=[between, at], daemon=True).start()
        is_led.touch()
        assert ranks.wait(1) == 1
        assert ranks.said(1).startswith("StartupError: rank 1 did not get a session with rank 0 at")


def relay(between: socket.socket, to: tuple[str, int]) -> None:
    """Pass on, both ways, what the first connection says."""
    caller, _ = between.accept()
    with caller, socket.create_connection(to) as called:
        while True:
            ready, _, _ = select.select([caller, called], [], [], 30)
            for each in ready:
                if not (data := each.recv(4096)):
                    return
                (called if each is caller else caller).sendall(data)


def test_a_group_whose_line_has_failed_ends_with_the_reason(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        woken = threading.Event()
        group = join(place, wake=woken.set)
        group.check()
        group.fail("the line to rank 1 failed: frame 3 was repeated")
        assert woken.is_set()
        group.check()

    with forked(1, tmp_path, body) as ranks:
        assert ranks.wait(0) == 1
        assert ranks.said(0) == "GroupFailed: the line to rank 1 failed: frame 3 was repeated"


def test_a_frame_that_nobody_of_the_group_has_sent_ends_a_link(pair: tuple[Linked, Linked]) -> None:
    first, second = pair
    first.status._links[1]._connection.sendall(bytes(100))
    assert second.lost.wait(30)
    reason, _ = second.status.reported(0) or ("", 0)
    assert reason.startswith("rank 0 on host 0 lost its connection (frame 0 does not come from the other end")


def test_hosts_of_groups_of_another_shape_do_not_meet(tmp_path: Path) -> None:
    """Nor does one that comes twice, as with the --node-rank of another: it waits for the first to end."""

    def body(place: RankPlace) -> None:
        if place.rank == 0:
            meet(place, b"")
        with pytest.raises(StartupError) as refused:
            meet(replace(place, rank=2, size=4), b"")
        expected = f"the group at {place.meeting} has --ranks 2 --nnodes 2, rank 2 has --ranks 4 --nnodes 2"
        assert str(refused.value) == expected
        with pytest.raises(StartupError, match=r"^rank 2 is in the group at \S+ already: --dist-init-addr must be"):
            meet(replace(place, rank=2, size=4), b"", patience=0.1)

    with forked(2, tmp_path, body, hosts=2) as ranks:
        assert ranks.wait(1) == 0, ranks.said(1)


def test_the_interface_towards_the_meeting() -> None:
    assert local_address("127.0.0.1:5000") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
