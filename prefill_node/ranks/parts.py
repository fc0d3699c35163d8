"""Chunks that several ranks send, each its block: one report of a chunk when all of its parts were reported."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from control.messages import AttemptId
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.ranks.orders import PartSent


@dataclass(frozen=True)
class Part:
    """Positions [start, stop) of a chunk, which rank `rank` sends."""

    rank: int
    start: int
    stop: int


@dataclass
class _Split:
    """A chunk whose parts are being sent."""

    chunk: Chunk
    missing: int
    """Parts that were not reported yet."""
    sent: list[PartSent] = field(default_factory=list)


class PartialReports:
    """Collects what ranks say of their parts. One loop calls it."""

    def __init__(self) -> None:
        self._splits: dict[tuple[int, AttemptId, int], _Split] = {}
        """By the rank, the attempt and the first position of each part that was not reported yet."""

    def expect(self, chunk: Chunk, parts: Sequence[Part]) -> None:
        """These parts, of which there is at least one, are all of the chunk."""
        split = _Split(chunk, len(parts))
        for part in parts:
            self._splits[part.rank, chunk.attempt, part.start] = split

    def take(self, rank: int, sent: PartSent) -> SendReport | None:
        """A part has been sent, as far as it will be. The chunk's report if it was the last one to come.

        Raises KeyError for a part that is not expected: each is reported once.
        """
        split = self._splits.pop((rank, sent.attempt, sent.start))
        split.sent.append(sent)
        split.missing -= 1
        return None if split.missing else _together(split.chunk, split.sent)


def _together(chunk: Chunk, parts: list[PartSent]) -> SendReport:
    """The chunk landed if all parts have; something of it lingers, or may be in flight, if it is so of any part."""
    errors = sorted((part.error for part in parts if part.error is not None), key=lambda error: error == "aborted")
    return SendReport(
        chunk=chunk,
        num_bytes=sum(part.num_bytes for part in parts),
        num_descriptors=sum(part.num_descriptors for part in parts),
        posted_at=min((part.posted_at for part in parts if part.posted_at is not None), default=None),
        ended_at=max(part.ended_at for part in parts),
        waited=min(part.waited for part in parts),
        checksums=[checksum for part in parts for checksum in part.checksums],
        error=next(iter(errors), None),
        lingering=any(part.lingering for part in parts),
        in_flight=any(part.in_flight for part in parts),
    )
