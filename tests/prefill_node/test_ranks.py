"""A prefill node of several ranks has all compute and send, and announces what all have reported."""

import pickle
import queue
import socket
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from control.messages import Abort, Admitted, ChunkDone, ChunkTaken, FetchGrant, PrefillDone, PrefillFailed, Quiesced
from prefill_node.orders import (
    OF_FIRST,
    OF_OTHERS,
    CancelTransfers,
    End,
    Order,
    Serve,
    Step,
    StepEnded,
    TransferReport,
    merged,
)
from prefill_node.worker import RankLoop
from ranks.barrier import GroupFailed
from ranks.executor import RankLine
from ranks.sealed_socket import INHERITED, SealedSocket
from tests.prefill_node.fakes import FakeControl
from tests.prefill_node.world import DECODE, FakeRanks, HeldWorker, R, World, new_cache, request
from transfer.memory import Checksum, Checksums


@pytest.fixture
def h() -> World:
    """Chunks of 6 and 4 tokens are blocks of 2, 2 and 2, and of 1, 1 and 2."""
    return World(world_size=3)


def test_every_rank_computes_all_chunks_and_sends_its_own_blocks(h: World) -> None:
    h.receive(request())
    h.start()
    for rank, worker in enumerate(h.workers):
        serve, step = worker.orders
        assert serve == Serve((DECODE,))
        assert isinstance(step, Step)
        [chunk] = step.chunks
        assert (chunk.token_ids.tolist(), chunk.start, chunk.sequence_length) == ([0, 1, 2, 3, 4, 5], 0, 11)
        assert chunk.pages.tolist() == [0, 1, 2]
        [write] = step.writes
        assert (write.start, write.stop) == (2 * rank, 2 * rank + 2)
        assert write.slots.tolist() == [2 * rank, 2 * rank + 1]


def test_done_is_said_with_what_all_ranks_have_sent_when_all_have_said_so(h: World) -> None:
    h.receive(request())
    h.compute()
    h.compute()
    assert [(write.start, write.stop) for write in h.writes] == [(0, 2), (6, 7)]
    h.sent(rank=2, checksums=True)
    h.sent(checksums=True)
    h.sent(rank=2, checksums=True)
    h.sent(rank=1, at=1)
    h.sent(checksums=True)
    assert h.repeated == [], "rank 1 still sends its block of the first chunk"
    h.sent(rank=1, checksums=True)
    chunk, done = h.repeated
    assert isinstance(chunk, ChunkDone)
    assert isinstance(done, PrefillDone)
    assert (chunk.number, sorted(chunk.checksums.stops)) == (0, [2, 4, 6])
    assert (done.chunks, sorted(done.checksums.stops)) == (1, [7, 10])
    assert (done.num_tokens, done.transferred_bytes, done.lingering) == (10, 6 * 10, False)
    assert h.free_pages == 5
    h.receive(ChunkTaken(attempt=R, number=0), Admitted(attempt=R))
    assert h.free_pages == 8


def test_ranks_stop_sending_a_chunk_of_which_one_has_failed(h: World) -> None:
    h.receive(request())
    h.compute()
    h.sent(rank=1, error="the connection was lost")
    assert h.is_cancelled(h.writes[0])
    h.sent(error="aborted")
    h.sent(rank=2, error="aborted")
    [failed] = h.control.take(PrefillFailed)
    assert failed.reason == "transfer failed: the connection was lost"


def test_a_rank_that_has_ended_is_never_said_to_be_quiet_and_ends_the_node(h: World) -> None:
    h.receive(request(), request(attempt=R._replace(request_id="waits")))
    h.compute()
    h.sent()
    h.sent(rank=1)
    h.ranks.ended = 2
    turns = h.script(lambda: None, lambda: h.receive(Abort(attempt=R)))
    with pytest.raises(GroupFailed, match="rank 2 ended"):
        h.endpoint.run()
    assert not turns
    assert h.has_left
    assert h.ranks.reported == "rank 2 ended"
    said = h.control.take(PrefillFailed)
    assert [(m.attempt.request_id, m.in_flight, m.leaving) for m in said] == [("waits", False, True)]
    assert h.control.take(Quiesced) == []
    assert list(h.held) == [R], "of which a write may be in flight"


def test_a_step_that_rank_0_cannot_compute_ends_the_node_once(h: World) -> None:
    h.receive(request())
    h.start()
    with pytest.raises(GroupFailed, match="rank 0 failed in step 1: prefill failed: out of memory"):
        h.finish("prefill failed: out of memory")
    h.tell()
    assert h.planner.has_failed


# --- what crosses between ranks ---


def orders() -> list[Order]:
    """One of each kind."""
    h = World(world_size=2, cache=new_cache(), fetch_policy="always")
    tokens, slots = tuple(range(80)), ((0, 16),)
    asked = request(token_ids=tokens, start=64, extents=slots, prompt_logprobs=None)
    h.receive(asked)
    h.start()
    h.tell()
    rows = [Checksum(buffer, at, at + 32, 7) for buffer in range(3) for at in (0, 32)]
    h.receive(FetchGrant(attempt=R, start=0, stop=64, extents=((10, 64),), checksums=Checksums.of(rows)))
    for rank in (0, 1):
        h.read(rank)
    h.start()
    h.finish()
    logprobs = R._replace(request_id="logprobs")
    h.receive(request(attempt=logprobs, prompt_logprobs=2, last_token_id=3), Abort(attempt=logprobs))
    h.compute()
    h.receive(Abort(attempt=R))
    return [*h.workers[1].orders, h.workers[0].orders[-1], End()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, tuple) and not hasattr(a, "_fields"):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in vars(a))
    return bool(a == b)


def test_orders_and_reports_are_the_same_on_the_other_side_of_a_line() -> None:
    found = orders()
    assert {type(order).__name__ for order in found} >= {
        "Serve",
        "BlockToRead",
        "Gather",
        "Step",
        "CancelTransfers",
        "End",
    }
    for order in found:
        assert same(OF_OTHERS.decode(OF_FIRST.encode(order)), order)
    report = TransferReport(3, 10, 1, 1.0, 2.0, 0.5, [Checksum(0, 1, 2, 2**64 - 1)], "lost", "read", True, True, False)
    assert OF_FIRST.decode(OF_OTHERS.encode(report)) == report


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pickle.dumps(End()),
        msgpack.packb(("End",)),
        msgpack.packb(("Exit", {})),
        msgpack.packb((["End"], {})),
        msgpack.packb(("Serve", {})),
        msgpack.packb(("CancelTransfers", {"works": "all"})),
        msgpack.packb(("Gather", {"number": 1, "prefixes": [{"pages": b"1234567", "bounds": [0]}]})),
        b"\x91" * 5000 + b"\x00",
        OF_OTHERS.encode(TransferReport(1)),
    ],
)
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        OF_OTHERS.decode(data)


def test_times_of_another_host_are_told_by_the_clock_of_rank_0() -> None:
    theirs = TransferReport(1, posted_at=101.0, ended_at=103.0, error="aborted").by_clock(-100.0)
    assert (theirs.posted_at, theirs.ended_at) == (1.0, 3.0)
    lost = TransferReport(1, num_bytes=5, ended_at=2.0, error="the connection was lost")
    whole = merged([theirs, lost])
    assert (whole.num_bytes, whole.posted_at, whole.ended_at) == (5, 1.0, 3.0)
    assert whole.error == "the connection was lost", "which says more than that it was aborted for it"
    assert TransferReport(1).by_clock(1.0).posted_at is None


class Rank:
    """Rank 1 with a held worker, and rank 0's line to it."""

    def __init__(self) -> None:
        first, own = (SealedSocket(end, INHERITED) for end in socket.socketpair())
        self.reports: queue.SimpleQueue[TransferReport] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.line = RankLine(first, 1, OF_FIRST, self.reports.put, self.failures.put)
        self.ranks = FakeRanks(1, 2)
        self.ranks.lines = {0: own}
        self.ranks.fail = self.failures.put  # type: ignore[assignment,method-assign]
        self.worker = HeldWorker()
        self.control = FakeControl()
        self.inbox: queue.SimpleQueue[Order | StepEnded] = queue.SimpleQueue()
        shell: Any = SimpleNamespace(control=self.control, inbox=self.inbox)
        self.loop = RankLoop(shell, self.ranks, self._new_worker)

    def _new_worker(self, report: Any) -> HeldWorker:
        self.report: Any = report
        return self.worker

    def turn(self) -> None:
        self.loop.take(self.inbox.get(timeout=10))


def test_another_rank_obeys_and_reports_what_it_has_sent() -> None:
    rank = Rank()
    for order in (Serve((DECODE,)), CancelTransfers((1, 2)), End()):
        rank.line.send(order)
        rank.turn()
    assert rank.control.watched == {DECODE}, "it has a lease of its own"
    assert rank.worker.cancelled == {1, 2}
    assert rank.loop._has_ended
    rank.report(TransferReport(7, num_bytes=3))
    assert rank.reports.get(timeout=10) == TransferReport(7, num_bytes=3)


def test_a_rank_that_fails_in_a_step_ends_the_group() -> None:
    rank = Rank()
    rank.report(StepEnded(1))
    rank.turn()
    rank.report(StepEnded(2, "prefill failed: out of memory"))
    with pytest.raises(GroupFailed, match="rank 1 failed in step 1: prefill failed: out of memory"):
        rank.turn()
