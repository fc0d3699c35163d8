"""Pairs items of pages (prefill) with slots (decode) and joins what is contiguous on both sides. Pure NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

NO_LIMIT = 1 << 62
"""Of descriptors or bytes."""


class Descriptors(NamedTuple):
    """What a transport writes: addresses and lengths in bytes, int64 [n] each."""

    sources: Int64s
    destinations: Int64s
    lengths: Int64s

    def at(self, source_base: int, destination_base: int) -> "Descriptors":
        """Addresses, from offsets to these bases."""
        return Descriptors(source_base + self.sources, destination_base + self.destinations, self.lengths)

    def at_each(self, source_bases: Sequence[int], destination_bases: Sequence[int]) -> "Descriptors":
        """`at` for each of these pairs of bases, one after another."""
        return Descriptors(
            np.add.outer(source_bases, self.sources).ravel(),
            np.add.outer(destination_bases, self.destinations).ravel(),
            np.tile(self.lengths, len(source_bases)),
        )

    def cut(self, most_bytes: int) -> "Descriptors":
        """Descriptors of at most that length: longer ones are cut into as few equal pieces as possible."""
        if not len(self.lengths) or self.lengths.max() <= most_bytes:
            return self
        pieces = -(-self.lengths // most_bytes)
        whole = np.repeat(np.arange(len(pieces)), pieces)
        nth = np.arange(len(whole)) - (np.cumsum(pieces) - pieces)[whole]
        every = -(-self.lengths // pieces)
        begins = nth * every[whole]
        lengths = np.minimum(every[whole], self.lengths[whole] - begins)
        return Descriptors(self.sources[whole] + begins, self.destinations[whole] + begins, lengths)

    def split(self, most: int) -> "list[Descriptors]":
        """Batches of at most that many descriptors."""
        if len(self.lengths) <= most:
            return [self]
        return [
            Descriptors(*(column[first : first + most] for column in self))
            for first in range(0, len(self.lengths), most)
        ]


@dataclass(frozen=True)
class Runs:
    """Maximal pieces that are contiguous on both sides, in items, int64 [n] each. The same for all layers."""

    sources: Int64s
    destinations: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, which: slice | NDArray[np.intp]) -> "Runs":
        return Runs(self.sources[which], self.destinations[which], self.lengths[which])

    @property
    def num_items(self) -> int:
        return int(self.lengths.sum())

    def split(self, every: int) -> list["Runs"]:
        """Runs of the same pairs, cut after each `every` items; the last piece may have fewer."""
        stops = np.cumsum(self.lengths)
        total = int(stops[-1]) if len(stops) else 0
        if total <= every:
            return [self]
        cuts = np.arange(every, total, every, dtype=np.int64)
        starts = stops - self.lengths
        # A run begins where one began before, and at every cut inside one.
        begins = np.concatenate((starts, cuts[starts[np.searchsorted(starts, cuts, side="right") - 1] != cuts]))
        begins.sort()
        run = np.searchsorted(starts, begins, side="right") - 1
        inside = begins - starts[run]
        whole = Runs(
            self.sources[run] + inside, self.destinations[run] + inside, np.diff(begins, append=np.int64(total))
        )
        bounds = [0, *np.searchsorted(begins, cuts).tolist(), len(begins)]
        return [whole[first:last] for first, last in pairwise(bounds)]

    def in_order_of_destinations(self) -> "Runs":
        return self[self.destinations.argsort()]

    def pack(self) -> tuple["Runs", "Runs"]:
        """Runs into a buffer of `num_items` items, and out of it. The latter end only where the destination does."""
        stops = np.cumsum(self.lengths)
        packed = stops - self.lengths
        breaks = np.flatnonzero(self.destinations[1:] != self.destinations[:-1] + self.lengths[:-1])
        begins = np.empty(min(len(self), 1) + len(breaks), dtype=np.int64)
        begins[:1] = 0
        begins[1:] = breaks + 1
        first = packed[begins]
        out = Runs(first, self.destinations[begins], np.diff(first, append=stops[-1:]))
        return Runs(self.sources, packed, self.lengths), out

    def descriptors(self, item_bytes: int) -> Descriptors:
        """Descriptors as offsets in buffers of that item size."""
        return Descriptors(self.sources * item_bytes, self.destinations * item_bytes, self.lengths * item_bytes)


def expand_extents(extents: tuple[tuple[int, int], ...], num_positions: int | None = None) -> Int64s:
    """The slot of every position, or of the first `num_positions`, from (start, length) extents in order."""
    if not extents:
        return np.empty(0, dtype=np.int64)
    # Flat, since NumPy takes three times as long for nested tuples.
    flat = np.fromiter(chain.from_iterable(extents), dtype=np.int64, count=2 * len(extents))
    starts, lengths = flat.reshape(-1, 2).T
    first_of = np.cumsum(lengths) - lengths
    if num_positions is not None:
        # Before expanding: a message may name more slots than fit into memory.
        lengths = np.clip(num_positions - first_of, 0, lengths)
    slots: Int64s = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - first_of, lengths)
    return slots


def expand_pages(pages: Int64s, page_size: int, start: int, stop: int) -> Int64s:
    """Item index of every position in [start, stop) of a request whose KV lies in `pages`.

    Position p lies in item `pages[p // page_size] * page_size + p % page_size`; the last page may be partial.
    """
    if not 0 <= start <= stop <= len(pages) * page_size:
        raise ValueError(f"positions [{start}, {stop}) are not covered by {len(pages)} pages of {page_size}")
    positions = np.arange(start, stop, dtype=np.int64)
    page, offset = np.divmod(positions, page_size)
    expanded: Int64s = pages[page] * page_size + offset
    return expanded


def plan_runs(sources: Int64s, destinations: Int64s) -> Runs:
    """Join pairs of items, in order, into runs. sources, destinations: item indices, int64 [n]."""
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} source items for {len(destinations)} destination slots")
    if len(sources) == 0:
        return Runs(sources, destinations, np.empty(0, dtype=np.int64))
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(destinations) != 1)) + 1
    first = np.concatenate(([0], breaks))
    return Runs(sources[first], destinations[first], np.diff(np.append(first, len(sources))))


def all_within(addresses: Int64s, lengths: Int64s, base: int, size: int) -> bool:
    """Whether every [address, address + length) lies within [base, base + size)."""
    offsets = addresses - base
    return bool(np.all((offsets >= 0) & (offsets <= size - lengths)))
