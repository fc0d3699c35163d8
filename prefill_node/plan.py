"""Plans how a chunk is sent: positions paired with slots, cut into parts, once for all layers."""

from dataclasses import dataclass, field

import numpy as np
import torch

from transfer.planner import NO_LIMIT, Descriptors, Int64s, Runs, expand_pages, plan_runs
from transfer.transport import Packing


@dataclass(frozen=True, eq=False)
class ChunkPart:
    """Positions [start, stop) of a request, in any buffer. Descriptors are computed once per item size.

    items: the source item of each position, int64 [stop - start]. most_bytes: of one descriptor. uploaded: the items on
    the device, once they were needed there; a part belongs to one lane.
    """

    start: int
    stop: int
    items: Int64s
    runs: Runs
    most_bytes: int
    uploaded: list[torch.Tensor] = field(default_factory=list)
    _direct: dict[int, Descriptors] = field(default_factory=dict)
    _packed: dict[int, tuple[Descriptors, Descriptors]] = field(default_factory=dict)

    def direct(self, item_bytes: int) -> Descriptors:
        """From source items to destination slots, as offsets in bytes, in the order of slots: so the destination's page
        table is walked from end to end, and not all over."""
        if item_bytes not in self._direct:
            runs = self.runs.in_order_of_destinations()
            self._direct[item_bytes] = runs.descriptors(item_bytes).cut(self.most_bytes)
        return self._direct[item_bytes]

    def packed(self, item_bytes: int) -> tuple[Descriptors, Descriptors]:
        """By way of a send buffer, as offsets in bytes: from source items into it, and from it to slots."""
        if item_bytes not in self._packed:
            into, out = self.runs.pack()
            out_descriptors = out.descriptors(item_bytes).cut(self.most_bytes)
            self._packed[item_bytes] = into.descriptors(item_bytes), out_descriptors
        return self._packed[item_bytes]


class ChunkPlan:
    """Positions [start, stop) of a request, from its `pages` to their `slots`, int64 [stop - start].

    most_bytes: of one descriptor.
    """

    def __init__(
        self, pages: Int64s, page_size: int, slots: Int64s, start: int, stop: int, most_bytes: int = NO_LIMIT
    ) -> None:
        self._start, self._stop = start, stop
        self._most_bytes = most_bytes
        self._items = expand_pages(pages, page_size, start, stop)
        self._slots = slots
        self._runs = plan_runs(self._items, self._slots)
        self._parts: dict[int, list[ChunkPart]] = {}
        """By the most items that a part has."""

    def should_pack(self, packing: Packing) -> bool:
        """Whether the chunk is packed into send buffers.

        `where it pays`: if that at least halves the descriptors, as it does if source pages are scattered and
        destination slots are not.
        """
        if packing != "where it pays":
            return packing == "always"
        destination_runs = 1 + np.count_nonzero(np.diff(self._slots) != 1)
        return bool(2 * destination_runs <= len(self._runs))

    def parts(self, most_items: int) -> list[ChunkPart]:
        """The chunk in as few parts as possible, of about the same size. Every layer gets the same objects."""
        if most_items not in self._parts:
            num_items = self._stop - self._start
            every = -(-num_items // -(-num_items // most_items))
            starts = range(self._start, self._stop, every)
            self._parts[most_items] = [
                ChunkPart(start, stop, self._items[start - self._start : stop - self._start], runs, self._most_bytes)
                for start, runs in zip(starts, self._runs.split(every), strict=True)
                for stop in [start + runs.num_items]
            ]
        return self._parts[most_items]
