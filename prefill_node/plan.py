"""What is sent of a chunk: positions paired with slots, cut into parts, once for all layers."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from transfer.checksum import SlotRuns
from transfer.planner import Int64s, Runs, expand_pages, plan_runs


@dataclass(frozen=True)
class Part:
    """Positions [start, stop) of a request in any buffer of one item size.

    items: the source item of each, int64 [stop - start]. direct: from source items to destination slots.
    """

    start: int
    stop: int
    items: Int64s
    direct: Runs

    @cached_property
    def item_runs(self) -> SlotRuns:
        """The source items, to be asked for the memory that holds some of them."""
        return SlotRuns(self.items)

    @cached_property
    def packed(self) -> tuple[Runs, Runs]:
        """The way over a send buffer: from source items into it, and from it to destination slots."""
        return self.direct.pack()


class ChunkPlan:
    """Positions [start, stop) of a request whose KV lies in `pages` and goes to `slots` (of all its positions)."""

    def __init__(self, pages: Int64s, page_size: int, slots: Int64s, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._items = expand_pages(pages, page_size, start, stop)
        self._slots = slots[start:stop]
        self._runs = plan_runs(self._items, self._slots)
        self._parts: dict[int, list[Part]] = {}
        """By the most items that a part has."""

    @property
    def gathering_pays(self) -> bool:
        """Whether sending from a packed copy takes at most half as many descriptors as sending in place.

        It does where source pages are scattered and destination slots are not; not where the destination decides.
        """
        destination_runs = 1 + np.count_nonzero(np.diff(self._slots) != 1)
        return bool(2 * destination_runs <= len(self._runs))

    def parts(self, most_items: int) -> list[Part]:
        """The chunk in parts of that many items, the last one smaller; the same objects for every layer."""
        if most_items not in self._parts:
            starts = range(self._start, self._stop, most_items)
            self._parts[most_items] = [
                Part(start, stop, self._items[start - self._start : stop - self._start], runs)
                for start, runs in zip(starts, self._runs.split(most_items), strict=True)
                for stop in [start + runs.num_items]
            ]
        return self._parts[most_items]
