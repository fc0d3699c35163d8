"""The world around remote prefills: prefill nodes whose messages the test sends, slots without memory, and a clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

from base.metrics import Metrics
from control.liveness import AnsweredPing
from control.messages import (
    AttemptId,
    ChunkDone,
    ChunkTaken,
    Generate,
    Peer,
    PrefillAccepted,
    PrefillDone,
    Progress,
)
from decode_node.attempt import PrefillAttempt
from decode_node.remote_prefill import PrefillMessage, RemotePrefill
from decode_node.request import Request, RequestState
from decode_node.verifier import ChecksumTask, Verification
from kvcache.extents import NO_SLOTS, Extent, HostSlots
from tests.decode_node.world import GATEWAY, PREFILL, destination
from tests.prefill_node.fakes import FakeControl
from transfer.checksum import Mismatch
from transfer.incoming import IncomingCut
from transfer.memory import Checksum, Checksums

R = AttemptId("decode", "r", 1)
SECOND = Peer(role="prefill", address="127.0.0.1:3", boot_id="second")
FIRST = Peer(role="prefill", address="127.0.0.1:2", boot_id="first")
SLOTS = HostSlots((Extent(4, 3),))
PATIENCE_S = 60.0
CHECKSUMS = Checksums.of(
    [Checksum(buffer=0, start=0, stop=3, digest=11), Checksum(buffer=1, start=0, stop=3, digest=12)]
)
CHUNK_CHECKSUMS = Checksums.of([Checksum(buffer=0, start=0, stop=1, digest=13)])
NO_CHECKSUMS = Checksums()


def attempt_to_fill(slots: HostSlots, num_tokens: int, epoch: int = 1) -> PrefillAttempt:
    """An attempt to have these slots filled with the KV of that many tokens."""
    request = Request(Generate(request_id="r", prompt_ids=(1,) * (num_tokens + 1), max_new_tokens=4), GATEWAY)
    return PrefillAttempt(AttemptId("decode", "r", epoch), request, PREFILL, slots, 0.0, num_tokens)


class Clock:
    """The time of the decode node's loop, which passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = float(int(time.monotonic()))  # so that sums of seconds are exact
        monkeypatch.setattr("decode_node.remote_prefill.time.monotonic", lambda: self.now)


@dataclass(frozen=True)
class Landed:
    """A call made this request land."""

    request: Request


class Lost(NamedTuple):
    """A request has lost its prefill attempt."""

    request: Request
    reason: str


@dataclass
class HeldVerifier:
    """Keeps what is to be verified until the test says what came of it; takes no more than `room`."""

    room: int = 8
    waiting: list[ChecksumTask] = field(default_factory=list)

    def submit(self, task: ChecksumTask) -> bool:
        if len(self.waiting) >= self.room:
            return False
        self.waiting.append(task)
        return True


class FakeHost:
    """The owner of host slots that name no memory. prefixes: stands for the cached prefixes, if there are any."""

    def __init__(self) -> None:
        self.freed: list[HostSlots] = []
        self.retained: list[HostSlots] = []
        self.prefixes: Any = None

    def release(self, slots: HostSlots) -> None:
        if slots != NO_SLOTS:
            self.freed.append(slots)

    def retain(self, slots: HostSlots) -> None:
        self.retained.append(slots)


class RemoteWorld:
    """Remote prefills of request `r`, which names FIRST and SECOND, into SLOTS."""

    def __init__(self, clock: Any = None) -> None:
        """clock: a Clock, where the test has one."""
        self.clock = clock
        self.control = FakeControl()
        self.host = FakeHost()
        self.freed, self.retained = self.host.freed, self.host.retained
        self.lost: list[Lost] = []
        self.verifier = HeldVerifier()
        self.metrics = Metrics()
        self.destination = destination(num_slots=100)
        self.remote = RemotePrefill(
            self.control,  # type: ignore[arg-type]
            self.destination,
            self.host,  # type: ignore[arg-type]
            lambda: IncomingCut(()),
            self.verifier.submit,
            self.metrics,
            patience=PATIENCE_S,
            on_lost=lambda request, reason: self.lost.append(Lost(request, reason)),
        )
        self.table = self.remote._reservations
        generate = Generate(request_id="r", prompt_ids=(1, 2, 3, 4), max_new_tokens=4, prefill_nodes=(FIRST, SECOND))
        self.request = Request(generate, GATEWAY)

    def dispatch(self, node: Peer = FIRST) -> None:
        self.remote.dispatch(self.request, node, SLOTS)

    def take(self, node: Peer, message: PrefillMessage) -> list[Lost]:
        return self.lost_by(lambda: self.remote.take(node, message))

    def tick(self, now: float) -> list[Lost]:
        return self.lost_by(lambda: self.remote.tick(now))

    def lost_by(self, call: Callable[[], None]) -> list[Lost]:
        self.lost.clear()
        call()
        return list(self.lost)

    def outcomes(self, call: Callable[[], None]) -> list[Landed | Lost]:
        """What a call changed."""
        before = self.request.state
        lost = self.lost_by(call)
        has_landed = before is not self.request.state is RequestState.LANDED
        return [*lost, *([Landed(self.request)] if has_landed else [])]

    def done(
        self,
        epoch: int = 1,
        num_tokens: int = 3,
        checksums: Checksums = NO_CHECKSUMS,
        node: Peer = FIRST,
        chunks: int = 0,
        lingering: bool = False,
    ) -> list[Landed | Lost]:
        attempt = R._replace(epoch=epoch)
        message = PrefillDone(
            attempt=attempt, num_tokens=num_tokens, chunks=chunks, checksums=checksums, lingering=lingering
        )
        return self.outcomes(lambda: self.remote.take(node, message))

    def chunk(
        self, number: int, epoch: int = 1, node: Peer = FIRST, checksums: Checksums = CHUNK_CHECKSUMS
    ) -> list[Landed | Lost]:
        """A chunk has landed. Whether that was answered, `taken` tells."""
        message = ChunkDone(attempt=R._replace(epoch=epoch), number=number, checksums=checksums)
        return self.outcomes(lambda: self.remote.take(node, message))

    def taken(self) -> list[int]:
        """The chunks that need not be said again, since the last call."""
        answers = self.control.take(ChunkTaken)
        assert all(isinstance(answer, ChunkTaken) and answer.attempt.request_id == "r" for answer in answers)
        return [answer.number for answer in answers if isinstance(answer, ChunkTaken)]

    def verified(self, *mismatches: Mismatch, error: str | None = None) -> list[Landed | Lost]:
        """What came of the oldest verification."""
        oldest = self.verifier.waiting.pop(0)
        assert isinstance(oldest, Verification)
        result = replace(oldest, mismatches=mismatches, error=error)
        return self.outcomes(lambda: self.remote.verified(result))

    def accepted(self) -> None:
        self.take(FIRST, PrefillAccepted(attempt=R))

    def progress(self, computed: int = 0, current_pass: int | None = None) -> None:
        assert self.take(FIRST, Progress(computed=((R, computed),), current_pass=current_pass)) == []

    def wait(self, seconds: float) -> list[Lost]:
        """Time passes, in which both nodes are heard."""
        self.clock.now += seconds
        self.control.heard |= {"first": self.clock.now, "second": self.clock.now}
        return self.tick(self.clock.now)

    def answer(self, boot_id: str, asked_at: float) -> None:
        """Whoever has FIRST's address answers a ping that was sent then."""
        self.control.answers[FIRST.address] = AnsweredPing(boot_id, asked_at)

    def failures(self, reason: str) -> float:
        return float(self.metrics.transfer_failures.labels(reason)._value.get())
