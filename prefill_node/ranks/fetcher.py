"""The fetcher of a prefill node of several ranks: each reads a block of a prefix, and together that is one fetch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from control.messages import AttemptId
from prefill_node.arrival import PrefixArrival
from prefill_node.fetch import Fetch, FetchReport
from prefill_node.fetcher import PrefixFetcher
from prefill_node.ranks.division import checksums_of_blocks, divide
from prefill_node.ranks.orders import DividedPrefix, PartRead, Read, StopReading


@dataclass(frozen=True)
class ReadPrefix:
    """What became of a fetch: its report, which rank has read what, and when all had (time.monotonic)."""

    report: FetchReport
    prefix: DividedPrefix
    read_at: float


@dataclass
class _Reading:
    """A fetch that some ranks have not told the end of yet."""

    fetch: Fetch
    prefix: DividedPrefix
    missing: set[int]
    """The ranks that have not."""
    read: list[PartRead] = field(default_factory=list)
    has_failed: bool = False
    is_stopped: bool = False
    """The other ranks were told not to go on."""

    def go_on(self) -> bool:
        return not self.has_failed and self.fetch.go_on()


class GroupFetcher:
    """A PrefixFetcher of which every rank reads a block. One loop calls it.

    The bytes cross the network once, and no rank has all of them when a fetch has ended. A failed part fails the fetch,
    and the other ranks stop. No layer is reported to the fetch's `arrival`: no forward pass may need what only one rank
    has, so a job is in no pass before its fetch is over.
    """

    def __init__(
        self,
        own: PrefixFetcher,
        ranks: int,
        order: Callable[[int, Read | StopReading], None],
        steps_ended: Callable[[], int],
    ) -> None:
        """own: rank 0's. order: has another rank do something. steps_ended: for `Read.after`."""
        self._own = own
        self._num_ranks = ranks
        self._order = order
        self._steps_ended = steps_ended
        self._readings: dict[AttemptId, _Reading] = {}

    def submit(self, fetch: Fetch) -> None:
        """See PrefixFetcher. The last `take` of its parts returns its report."""
        bounds = divide(fetch.checksums, fetch.start, fetch.stop, self._num_ranks)
        blocks = list(pairwise(bounds))
        asked = {rank for rank, (start, stop) in enumerate(blocks) if start < stop}
        reading = _Reading(fetch, DividedPrefix(fetch.pages, bounds), asked)
        self._readings[fetch.attempt] = reading
        checksums = checksums_of_blocks(fetch.checksums, bounds)
        for rank in sorted(asked):
            start, stop = blocks[rank]
            slots = fetch.slots[start - fetch.start : stop - fetch.start]
            if rank:
                after = self._steps_ended()
                self._order(rank, Read(fetch.attempt, start, stop, fetch.pages, slots, checksums[rank], after))
                continue
            part = replace(
                fetch,
                start=start,
                stop=stop,
                slots=slots,
                checksums=checksums[rank],
                go_on=reading.go_on,
                arrival=PrefixArrival(fetch.arrival.layer_of_buffer),
            )
            self._own.submit(part)

    def take(self, rank: int, read: PartRead) -> ReadPrefix | None:
        """A rank reads no more of its block. The end of the fetch if it was the last one to say so.

        Raises KeyError for a part that is not expected: each is reported once.
        """
        reading = self._readings[read.attempt]
        reading.missing.remove(rank)
        reading.read.append(read)
        reading.has_failed |= read.error is not None
        if reading.missing:
            return None
        del self._readings[read.attempt]
        return ReadPrefix(_together(reading.fetch, reading.read), reading.prefix, time.monotonic())

    def stop_what_is_not_wanted(self) -> None:
        """Tell the other ranks of fetches that have failed, or were given up. To be called again and again."""
        for reading in self._readings.values():
            if not reading.is_stopped and not reading.go_on():
                reading.is_stopped = True
                for rank in sorted(reading.missing - {0}):
                    self._order(rank, StopReading(reading.fetch.attempt))

    def keep_only(self, boot_ids: set[str]) -> None:
        """See PrefixFetcher. The other ranks are told by `Connected`."""
        self._own.keep_only(boot_ids)


def _together(fetch: Fetch, parts: list[PartRead]) -> FetchReport:
    """All is there if each part is. What failed first says why not, unless it is not known whether a read has ended."""
    failed = sorted((part for part in parts if part.error is not None), key=lambda part: not part.in_flight)
    return FetchReport(
        fetch,
        num_bytes=sum(part.num_bytes for part in parts),
        seconds=max(part.seconds for part in parts),
        error=failed[0].error if failed else None,
        failure=failed[0].failure if failed else None,
        in_flight=any(part.in_flight for part in parts),
    )
