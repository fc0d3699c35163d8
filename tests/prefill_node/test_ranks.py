"""Rank 0 of a prefill node: has all ranks compute and send, and announces what all have said."""

import os
import queue
import socket
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from base.phase import Phase
from control.messages import (
    Abort,
    Admitted,
    ChunkDone,
    ChunkTaken,
    Message,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Quiesced,
)
from prefill_node.compute import Computed
from prefill_node.job import TransferJob
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.outgoing import SendReport
from prefill_node.progress import ForwardProgress
from prefill_node.ranks.leader import GroupCompute, GroupEngine, GroupSender, Layout
from prefill_node.ranks.order_codec import OF_OTHERS
from prefill_node.ranks.orders import Begin, Forget, Order, PartSent, Step, Stop
from prefill_node.ranks.parts import Part, PartialReports
from ranks.barrier import GroupFailed
from ranks.place import RankPlace, create_places
from ranks.rank_line import RankLine, inherited_lines
from ranks.sealed_socket import INHERITED, SealedSocket
from tests.prefill_node.endpoint_harness import DECODE, Harness, R, checksum_of, request
from transfer.memory import Checksum


class FakeRanks:
    """A group of three, of which this is rank 0."""

    rank = 0
    world_size = 3

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.lines = inherited_lines(place)
        self.ended: int | None = None
        self.reported = ""
        self.failed = ""

    def check(self) -> None:
        if self.ended is not None:
            raise GroupFailed(f"rank {self.ended} ended")

    def fail(self, reason: str) -> None:
        self.failed = reason

    def failure(self, error: object) -> GroupFailed:
        return GroupFailed(f"rank 0 failed in step 1: {error}")

    def end_step(self) -> None:
        pass

    def sync_phase(self, standing: Phase) -> Phase:
        return standing

    def report(self, reason: str) -> None:
        self.reported = reason


class GroupHarness(Harness):
    """Rank 0 with a held sender and computation of its own, and the far ends of its lines to ranks 1 and 2.

    A prompt of 10 tokens is computed in chunks of 6 and 4: blocks of 2, 2 and 2, and of 1, 1 and 2 tokens.
    """

    def __init__(self) -> None:
        self.place = create_places(3, lines=True)[0]
        self.ranks = FakeRanks(self.place)
        super().__init__()
        self.endpoint._ranks = self.ranks  # type: ignore[assignment]
        assert isinstance(self.engine, GroupEngine)
        layouts: WeakKeyDictionary[ForwardProgress, Layout] = WeakKeyDictionary()
        self.engine._compute = GroupCompute(self.computing, 3, layouts, self.engine._order)
        self.engine._sender = GroupSender(self.sender, layouts, self.engine._partial)
        self.orders: list[queue.SimpleQueue[Order]] = [queue.SimpleQueue() for _ in range(2)]
        ends = [SealedSocket(socket.socket(fileno=own), INHERITED) for _, own in self.place.lines]
        self.lines = [
            RankLine(end, OF_OTHERS, orders.put, self.ranks.fail) for end, orders in zip(ends, self.orders, strict=True)
        ]

    def new_engine(self, parts: EngineParts) -> ModelEngine:
        return GroupEngine(parts, self.ranks, None)  # type: ignore[arg-type]

    def order(self, rank: int = 1) -> Order:
        """The next order that a rank got."""
        return self.orders[rank - 1].get(timeout=10)

    def said(self, rank: int, start: int, num_bytes: int = 5, checksum: Checksum | None = None, **says: Any) -> None:
        """A rank says that its part, which begins there, has ended."""
        checksums = [checksum] if checksum else []
        fields = {"error": None, "lingering": False, "in_flight": False, **says}
        assert isinstance(self.engine, GroupEngine)
        self.engine._on_part(rank, PartSent(R, start, num_bytes, 1, 1.0, 2.0, 0.0, checksums, **fields))
        self.tell()

    def said_by_node(self) -> list[type[Message]]:
        """Kinds of messages that the decode node has got or gets, but for those that accept a request."""
        messages = [m for _, m in self.control.sent] + [m for _, m in self.control.repeated.values()]
        return [type(message) for message in messages if not isinstance(message, PrefillAccepted)]


@pytest.fixture
def h() -> Iterator[GroupHarness]:
    harness = GroupHarness()
    yield harness
    for descriptor in (harness.place.status, harness.place.store, *harness.place.wakeup_fds):
        os.close(descriptor)


def test_every_rank_is_told_what_to_compute_in_which_pages(h: GroupHarness) -> None:
    h.receive(request())
    h.compute()
    for rank in (1, 2):
        assert h.order(rank) == Begin(DECODE, request())
        step = h.order(rank)
        assert isinstance(step, Step)
        [chunk] = step.chunks
        assert (chunk.attempt, chunk.start, chunk.stop, chunk.sequence_length) == (R, 0, 6, 11)
        assert chunk.pages.tolist() == [0, 1, 2]
    [own] = h.sender.chunks
    assert (own.start, own.stop) == (0, 2)


def test_done_is_said_when_every_rank_has_said_so_with_the_checksums_and_bytes_of_all(h: GroupHarness) -> None:
    h.receive(request())
    h.compute()
    h.compute()
    assert [(chunk.start, chunk.stop) for chunk in h.sender.chunks] == [(0, 2), (6, 7)]
    h.said(2, 4, checksum=checksum_of(4, 6))
    h.sent(checksums=True)
    h.said(2, 8, checksum=checksum_of(8, 10))
    h.said(1, 7)
    h.sent(checksums=True)
    assert h.said_by_node() == [], "rank 1 still sends its block of the first chunk"
    h.said(1, 2, checksum=checksum_of(2, 4))
    [(_, chunk), (_, done)] = h.control.repeated.values()
    assert isinstance(chunk, ChunkDone)
    assert isinstance(done, PrefillDone)
    assert (chunk.number, sorted(chunk.checksums.stops)) == (0, [2, 4, 6])
    assert (done.chunks, sorted(done.checksums.stops)) == (1, [7, 10])
    assert (done.num_tokens, done.transferred_bytes, done.lingering) == (10, 2 * 10 + 4 * 5, False)
    assert h.free_pages == 5
    h.receive(ChunkTaken(attempt=R, number=0))
    h.receive(Admitted(attempt=R))
    assert h.free_pages == 8
    orders = [h.order() for _ in range(4)]
    assert isinstance(orders[2], Step)
    assert orders[3] == Forget(R)


def test_an_abort_goes_to_all_ranks_and_quiesced_is_said_when_all_are_quiet(h: GroupHarness) -> None:
    """A late write of any rank would corrupt another request."""
    h.receive(request())
    h.compute()
    h.receive(Abort(attempt=R))
    assert [type(h.order()) for _ in range(2)] == [Begin, Step]
    assert h.order() == Stop(R)
    h.sent(error="aborted")
    h.said(1, 2)
    assert h.said_by_node() == []
    assert h.free_pages == 5
    h.said(2, 4, error="aborted", lingering=True)
    assert h.control.take(Quiesced) == [Quiesced(attempt=R, lingering=True)]
    assert h.free_pages == 8
    assert h.order() == Forget(R)


def test_a_write_of_a_rank_that_nobody_knows_the_end_of_is_never_said_to_be_quiet(h: GroupHarness) -> None:
    h.receive(request())
    h.compute()
    h.said(1, 2, error="nobody knows whether a write has ended", in_flight=True)
    h.said(2, 4)
    h.sent()
    [failed] = [m for _, m in h.control.repeated.values()]
    assert isinstance(failed, PrefillFailed)
    assert failed.in_flight
    h.receive(Abort(attempt=R))
    assert h.control.take(Quiesced) == []


def test_a_rank_that_has_ended_is_never_said_to_be_quiet_and_ends_the_node(h: GroupHarness) -> None:
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="waits")))
    h.compute()
    h.sent()
    h.said(1, 2)
    h.ranks.ended = 2
    turns = h.script(lambda: None, lambda: h.receive(Abort(attempt=R)))
    with pytest.raises(GroupFailed, match="rank 2 ended"):
        h.endpoint.run()
    assert not turns
    assert h.left
    assert h.ranks.reported == "rank 2 ended"
    said = h.control.take(PrefillFailed)
    assert [(m.attempt.request_id, m.in_flight, m.leaving) for m in said if isinstance(m, PrefillFailed)] == [
        ("waits", False, True)
    ]
    assert h.control.take(Quiesced) == []
    assert h.engine.attempts == [R], "of which a write may be in flight"


def test_a_step_that_rank_0_cannot_compute_ends_the_node(h: GroupHarness) -> None:
    """The collectives of the others wait for it."""
    h.receive(request())
    h.start()
    step = h.computing.step
    assert step is not None
    h.engine._report(Computed(step, "prefill failed: out of memory"))
    with pytest.raises(GroupFailed, match="rank 0 failed in step 1: prefill failed: out of memory"):
        h.engine.poll()
    h.engine.poll()


def test_parts_that_were_never_sent_or_are_reported_twice_are_errors() -> None:
    reports = PartialReports()
    job = TransferJob.of(request(), DECODE)
    job.pages = np.arange(3)
    chunk = job.chunk(0, 6, ForwardProgress(torch.device("cpu")))
    reports.expect(chunk, [Part(0, 0, 3), Part(2, 3, 6)])
    aborted = SendReport(chunk.part(3, 6), 7, 2, posted_at=101.0, ended_at=103.0, error="aborted")
    sent = PartSent.of(aborted, clock_ahead=-100.0)  # it is on another host
    assert reports.take(2, sent) is None
    with pytest.raises(KeyError):
        reports.take(2, sent)
    with pytest.raises(KeyError):
        reports.take(1, sent)
    lost = PartSent.of(SendReport(chunk.part(0, 3), 5, 1, ended_at=2.0, error="the connection was lost"))
    whole = reports.take(0, lost)
    assert whole is not None
    assert whole.chunk is chunk
    assert (whole.num_bytes, whole.num_descriptors, whole.posted_at, whole.ended_at) == (12, 3, 1.0, 3.0)
    assert whole.error == "the connection was lost", "which says more than that it was aborted for it"
