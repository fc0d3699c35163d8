"""Makes a long row resident, by copies that run in parallel to the steps.

A fill takes hot slots for all positions of a row, and copies to them, part by part, what is in host memory. Meanwhile
steps go on with the row's hot buffer, of which the fill touches nothing. States of a fill:

- *copying*: a part is on the copy stream, or the next one can be queued.
- *caught up*: fewer than `_CATCH_UP` verified tokens are missing. They and the tokens of steps that were queued are
  copied between two steps, and the row gets the slots in place of its own.
- *abandoned*: see `FillEnd`. The slots are free when the part on the copy stream is over.

A part is queued after the work that its slots' last owners gave the device, and the row gets the slots only when the
host has seen the end of the last part. So slots change owners after the work of both streams.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from hisparse.staging import CopyEvent, CopyStream
from hisparse.swap_in import SwapInBackend
from kvcache.extents import Extent, HostSlots, common_runs

_PART_BYTES = 128 * 2**20
"""A step takes about as long as the copy of some such parts, so that a step that waits for one waits shortly."""
_PART_RUNS = 8
"""Runs of consecutive slots in a part at most: each is a copy of every layer, which the host has to queue."""
_CATCH_UP = 64
_LEAST_SLACK = 64
"""Tokens that a row may get while it is filled, and one more for each 128 that it has: the smallest parts have 512."""


class FillEnd(Enum):
    """How a fill ends: the row is resident, or the fill is abandoned, and why."""

    RESIDENT = "resident"
    OUTGROWN = "outgrown"
    """The row got more tokens than the fill has slots for."""
    RECLAIMED = "reclaimed"
    """Another row needs the slots."""
    LEFT = "left"
    """The request ended, or was retracted."""
    FAILED = "failed"
    """A copy raised an error."""


@dataclass(eq=False)
class _Fill:
    """slabs: what was taken of the pool. slots: int64 [positions], the hot slot of each. filled: positions that are
    there once `event` is over. abandoned: its slots go back then."""

    row: int
    slabs: tuple[Extent, ...]
    slots: npt.NDArray[np.int64]
    filled: int = 0
    event: CopyEvent | None = None
    abandoned: bool = False

    @property
    def is_copying(self) -> bool:
        return self.event is not None and not self.event.done()


class RowFiller:
    """Fills one row at a time. copied_bytes: what was copied so far. ends: how many fills ended how."""

    def __init__(self, backend: SwapInBackend, stream: CopyStream) -> None:
        self._backend = backend
        self._device = backend.device
        self._stream = stream
        self._fill: _Fill | None = None
        layout = backend.host.layout
        self._position_bytes = layout.num_layers * layout.item_bytes
        self.copied_bytes = 0
        self.ends: Counter[FillEnd] = Counter()

    @property
    def is_idle(self) -> bool:
        """Whether no slots are taken, an abandoned fill's included."""
        return self._fill is None

    @property
    def row(self) -> int | None:
        """The row that is being filled."""
        return None if self._fill is None or self._fill.abandoned else self._fill.row

    def slabs_for(self, num_tokens: int) -> int:
        """Slabs that `start` takes for a row."""
        slack = _LEAST_SLACK + num_tokens // 128
        return self._device.slab.for_slots(min(num_tokens + slack, self._device.max_context))

    def start(self, row: int, num_tokens: int) -> None:
        """Begin to fill a row that has `num_tokens` tokens. The caller has asked whether there are enough slots."""
        assert self._fill is None, "one at a time"
        slabs = self._device.take(self.slabs_for(num_tokens))
        assert slabs is not None, "as many are free"
        self._fill = _Fill(row, slabs, self._device.slots_of(slabs))

    def advance(self, host_slots: HostSlots, num_tokens: int, reached: int) -> bool:
        """Go on, and make the row resident once it has caught up. Whether it is.

        num_tokens: tokens of the row whose KV is on the host. reached: what it has at most after the steps that were
        queued. Raises what a copy raised; the fill is abandoned then.
        """
        fill = self._fill
        assert fill is not None, "a row is being filled"
        if fill.is_copying:
            return False
        if reached > len(fill.slots):
            self.abandon(FillEnd.OUTGROWN)
            return False
        try:
            if fill.event is not None:
                fill.event.result()
            if num_tokens - fill.filled > _CATCH_UP:
                self._copy_part(fill, host_slots.slots()[fill.filled : num_tokens])
                return False
        except Exception:
            self.abandon(FillEnd.FAILED)
            raise
        self._backend.catch_up(fill.row, fill.filled, fill.slots[fill.filled : reached])
        self._device.make_resident(fill.row, fill.slabs)
        self._fill = None
        self.ends[FillEnd.RESIDENT] += 1
        return True

    def abandon(self, why: FillEnd) -> None:
        """Give the slots back, at once or when the part that is being copied is over: see `poll`."""
        if self._fill is not None and not self._fill.abandoned:
            self._fill.abandoned = True
            self.ends[why] += 1
        self.poll()

    def poll(self) -> None:
        """Release the slots of an abandoned fill once nothing writes to them."""
        fill = self._fill
        if fill is not None and fill.abandoned and not fill.is_copying:
            self._device.drop(fill.slabs)
            self._fill = None

    def _copy_part(self, fill: _Fill, host_slots: npt.NDArray[np.int64]) -> None:
        """Queue the copy of some of the next positions, which have these host slots."""
        host_slots = host_slots[: max(1, _PART_BYTES // self._position_bytes)]
        hot_slots = fill.slots[fill.filled : fill.filled + len(host_slots)]
        runs = common_runs(host_slots, hot_slots)[:_PART_RUNS]
        fill.event = self._stream.submit(lambda: self._backend.fill(runs))
        count = sum(count for _, _, count in runs)
        fill.filled += count
        self.copied_bytes += count * self._position_bytes
