"""Hashes what a prefill node says it wrote, beside the loop: hundreds of megabytes must not hold up decoding."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from control.messages import AttemptId, BufferInfo, Checksums
from decode_node.attempt import PartNumber, PrefillAttempt
from transfer.checksum import Mismatch, verify

log = structlog.get_logger(__name__)

_MAX_WAITING = 1024
_MAX_NAMED = 4


@dataclass(frozen=True)
class Verification:
    """What to verify: the checksums of one part of an attempt, over the slots of its positions."""

    attempt: PrefillAttempt
    part: PartNumber
    checksums: Checksums


@dataclass(frozen=True)
class Verified:
    """What came of it. `error` says why it could not be carried out."""

    attempt_id: AttemptId
    part: PartNumber
    num_checksums: int
    mismatches: tuple[Mismatch, ...] = ()
    error: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the bytes must not be used, or None if they are what was sent."""
        if self.error is not None:
            return f"checksums could not be verified: {self.error}"
        if self.mismatches:
            return f"{len(self.mismatches)} of {self.num_checksums} checksums do not match"
        return None

    def examples(self) -> list[str]:
        """The first few mismatches in words: buffer, positions, digests, and the first few of their addresses."""
        return [_describe(mismatch) for mismatch in self.mismatches[:_MAX_NAMED]]


class Verifier:
    """One thread with a bounded queue. It owns nothing: of an attempt it reads the id and where its positions lie.

    `report` is called on that thread, once for each verification that was taken. The slots may meanwhile be given up
    and used by others: they are only read, and the result of an attempt that nobody waits for any more means nothing.
    """

    def __init__(
        self, buffers: BufferInfo, report: Callable[[Verified], None], max_waiting: int = _MAX_WAITING
    ) -> None:
        self._buffers = buffers
        self._report = report
        self._waiting: queue.Queue[Verification | None] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verify", daemon=True)
        self._thread.start()

    def submit(self, verification: Verification) -> bool:
        """Queue it. False if too many are waiting: then nothing was taken."""
        try:
            self._waiting.put_nowait(verification)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Report nothing more and return when no buffer is read any more."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (verification := self._waiting.get()) is not None:
            if self._closing.is_set():
                continue
            verified = self._verify(verification)
            if not self._closing.is_set():
                self._report(verified)

    def _verify(self, verification: Verification) -> Verified:
        attempt, part, count = verification.attempt, verification.part, len(verification.checksums)
        try:
            mismatches = verify(
                verification.checksums.rows(),
                self._buffers,
                attempt.positions,
                attempt.num_tokens,
                go_on=lambda: not self._closing.is_set(),
            )
        except Exception as error:
            # It costs the attempt, which is made again elsewhere, and not the thread.
            log.exception("verification failed", request_id=attempt.id.request_id, epoch=attempt.id.epoch)
            return Verified(attempt.id, part, count, error=str(error))
        return Verified(attempt.id, part, count, tuple(mismatches))


def _describe(mismatch: Mismatch) -> str:
    what = f"buffer {mismatch.buffer}, positions [{mismatch.start}, {mismatch.stop})"
    if mismatch.found is None:
        return f"{what}: there is no such thing"
    ranges = [f"{address:#x}+{length}" for address, length in mismatch.ranges[:_MAX_NAMED]]
    if len(mismatch.ranges) > _MAX_NAMED:
        ranges.append(f"and {len(mismatch.ranges) - _MAX_NAMED} more")
    return f"{what}: {mismatch.found:#018x}, not {mismatch.expected:#018x}, at {', '.join(ranges)}"
