"""Hashes arrived and leased KV on a thread: hundreds of megabytes must not delay decoding."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from decode_node.attempt import ChunkNumber, PrefillAttempt
from transfer.checksum import Mismatch, digests, verify
from transfer.memory import BufferInfo, Checksums
from transfer.planner import Int64s

log = structlog.get_logger(__name__)

_MAX_NAMED = 4
NO_CHECKSUMS = Checksums()


@dataclass(frozen=True)
class Verification:
    """The checksums of one chunk of an attempt, to be verified; and then the result.

    error: why they could not be verified.
    """

    attempt: PrefillAttempt
    chunk: ChunkNumber
    checksums: Checksums
    mismatches: tuple[Mismatch, ...] = ()
    error: str | None = None

    @property
    def failure_reason(self) -> str | None:
        """Why the bytes must not be used, or None if they are what was sent."""
        if self.error is not None:
            return f"checksums could not be verified: {self.error}"
        if self.mismatches:
            return f"{len(self.mismatches)} of {len(self.checksums)} checksums do not match"
        return None

    def examples(self) -> list[str]:
        """The first few mismatches: buffer, positions, digests, and the first few of their addresses."""
        return [_describe(mismatch) for mismatch in self.mismatches[:_MAX_NAMED]]


@dataclass(frozen=True, eq=False)
class Digesting:
    """Slots of which the digests are wanted; and then those, or why they could not be computed.

    slots: int64 [n], of the positions from `start` on.
    """

    attempt: PrefillAttempt
    start: int
    slots: Int64s
    digests: Checksums = NO_CHECKSUMS
    error: str | None = None


ChecksumTask = Verification | Digesting


class Verifier:
    """One thread with a bounded queue. `report` gets each task that was accepted back, with its result, on that thread.

    The slots of an attempt may be given up and reused while they are hashed. They are only read, and nobody uses the
    result of an attempt that was given up.
    """

    def __init__(self, buffers: BufferInfo, report: Callable[[ChecksumTask], None], max_waiting: int = 1024) -> None:
        self._buffers = buffers
        self._report = report
        self._waiting: queue.Queue[ChecksumTask | None] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verify", daemon=True)
        self._thread.start()

    def submit(self, task: ChecksumTask) -> bool:
        """Queue a task. False, and nothing is queued, if too many are waiting."""
        try:
            self._waiting.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Report nothing more, and return when no buffer is read any more."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            if self._closing.is_set():
                continue
            try:
                result = self._verify(task) if isinstance(task, Verification) else self._digest(task)
            except Exception as failure:
                # Only this attempt fails, or its node computes what it asked for; the thread goes on.
                failed = "verification failed" if isinstance(task, Verification) else "digests failed"
                log.exception(failed, **task.attempt.id.log_fields)
                result = replace(task, error=str(failure))
            if not self._closing.is_set():
                self._report(result)

    def _digest(self, task: Digesting) -> Digesting:
        found = list(digests(self._buffers, task.slots, task.start, go_on=lambda: not self._closing.is_set()))
        return replace(task, digests=Checksums.of(found))

    def _verify(self, task: Verification) -> Verification:
        attempt, started = task.attempt, time.monotonic()
        mismatches = verify(
            task.checksums.rows(),
            self._buffers,
            attempt.positions,
            attempt.num_tokens,
            go_on=lambda: not self._closing.is_set(),
        )
        verified = replace(task, mismatches=tuple(mismatches))
        attempt.span.record(
            "verify", started, attributes=lambda: {"checksums": len(task.checksums)}, error=verified.failure_reason
        )
        return verified


def _describe(mismatch: Mismatch) -> str:
    checksum = mismatch.checksum
    what = f"buffer {checksum.buffer}, positions [{checksum.start}, {checksum.stop})"
    if mismatch.found is None:
        return f"{what}: there is no such thing"
    ranges = [f"{address:#x}+{length}" for address, length in mismatch.ranges[:_MAX_NAMED]]
    if len(mismatch.ranges) > _MAX_NAMED:
        ranges.append(f"and {len(mismatch.ranges) - _MAX_NAMED} more")
    return f"{what}: {mismatch.found:#018x}, not {checksum.digest:#018x}, at {', '.join(ranges)}"
