"""One decode step: what the model sees of the KV tiers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.swap_in import StepBatch, SwapInPlan

if TYPE_CHECKING:
    from hisparse.coordinator import HiSparseCoordinator


class StepError(RuntimeError):
    """A decode step was used out of turn."""


@dataclass(frozen=True)
class IndexPages:
    """Paged index keys of a decode batch in one index layer.

    keys: [num_pages, page_size, index_dim]. page_table: int64 [batch, max_pages]; entries past a row's length are
    arbitrary valid pages. seq_lens: int64 [batch], counting the newest token, 0 for padding. lengths: the same on the
    host, None where only the device knows them.
    """

    keys: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: tuple[int, ...] | None


def locate_newest(device: DeviceKVPool, rows: torch.Tensor, newest: torch.Tensor) -> StepBatch:
    """Look up on the device where the newest tokens go. rows, newest: int64 [batch], below 0 for padding."""
    exists, row, position = rows >= 0, rows.clamp(min=0), newest.clamp(min=0)
    page_size = device.index_page_size
    index_row = device.page_table[row, position // page_size] * page_size + position % page_size
    return StepBatch(
        rows=rows,
        newest=newest,
        newest_slots=torch.where(exists, device.hot_slots[row, position.clamp(max=device.device_buffer_size)], -1),
        newest_index_rows=torch.where(exists, index_row, -1),
        newest_host_slots=torch.where(exists, device.host_slot_of[row, position], -1),
    )


@dataclass
class GroupPlan:
    """The swap-in plan of one index layer in one step, and the layers of its group that were not fetched yet."""

    plan: SwapInPlan
    to_fetch: list[int]


@dataclass(frozen=True)
class SwappedIn:
    """What one layer asked for and was answered. positions, slots: int64 [batch, k], -1 where there is none."""

    layer: int
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(eq=False)
class DecodeStep:
    """A batch of requests of which each computes one new token; the decode cache that the model runs against.

    The model stores the new token's items and index keys in each layer and swaps in what it selected. `finish` makes
    the tokens count. Until then nothing has happened that beginning the step again would not overwrite.

    A step that is recorded (`HiSparseCoordinator.begin_recorded_step`) names no requests and knows no lengths.
    """

    coordinator: "HiSparseCoordinator"
    device: DeviceKVPool
    request_ids: tuple[str, ...]
    batch: StepBatch
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: tuple[int, ...] | None
    plans: dict[int, GroupPlan] = field(default_factory=dict)
    to_verify: list[SwappedIn] = field(default_factory=list)

    @property
    def rows(self) -> torch.Tensor:
        """Rows of the device pool, int64 [batch]."""
        return self.batch.rows

    @property
    def is_recorded(self) -> bool:
        """Whether nothing of it is carried out before it is replayed."""
        return self.lengths is None

    def append(self, layer: int, items: torch.Tensor) -> None:
        """Store the new tokens' KV items, [batch, item_dim]."""
        self.coordinator.store_items(self, layer, items)

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' index keys, [batch, index_dim]."""
        self.coordinator.store_index_keys(self, index_layer, keys)

    def index_pages(self, index_layer: int) -> IndexPages:
        """The index keys to score against, new tokens included."""
        return IndexPages(self.device.index_keys[index_layer], self.page_table, self.seq_lens, self.lengths)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Make the selected positions resident; see HiSparseCoordinator.swap_in_selected_pages."""
        return self.coordinator.swap_in_selected_pages(self, layer, positions)

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's device items, [num_slots, item_dim]."""
        return self.device.kv[layer]

    def finish(self) -> None:
        """Back up the new tokens to the host tier and count them; see HiSparseCoordinator.finish_step."""
        self.coordinator.finish_step(self)

    def complete_fetches(self, fetch: Callable[[SwapInPlan, int], None]) -> None:
        """Fetch in the layers that did not ask for it, since residency says that all layers of a group have the item.

        After a step that ran through there is nothing to do.
        """
        for group in self.plans.values():
            while group.to_fetch:
                fetch(group.plan, group.to_fetch[0])
                group.to_fetch.pop(0)
