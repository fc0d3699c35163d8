"""One decode step: what the model sees of the KV tiers, and does to them."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.host_pool import HostKVPool
from hisparse.swap_in import StepBatch, SwapInBackend, SwapInPlan
from hisparse.verify import verify_swap_in


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
        newest_slots=torch.where(exists, device.hot_slots(row, position.clamp(max=device.device_buffer_size)), -1),
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


@dataclass(frozen=True)
class Tiers:
    """What steps work on. verify: check every swap-in against the host copy, which is slow."""

    host: HostKVPool
    device: DeviceKVPool
    backend: SwapInBackend
    verify: bool

    @cached_property
    def layers_of_group(self) -> dict[int, list[int]]:
        """The layers that share an index layer's selection, in order, by that index layer."""
        groups: dict[int, list[int]] = {}
        for layer, index_layer in enumerate(self.host.layout.index_layer_of):
            groups.setdefault(index_layer, []).append(layer)
        return groups


class StepState(Enum):
    OPEN = "open"
    FINISHED = "finished"
    ABANDONED = "abandoned"


@dataclass(eq=False)
class DecodeStep:
    """A batch of requests of which each computes one new token; the decode cache that the model runs against.

    The model stores the new token's items and index keys in each layer and swaps in what it selected. Until the step is
    finished nothing has happened that beginning it again would not overwrite. `HiSparseCoordinator` begins, finishes
    and abandons steps; one is open at a time.

    rows, newest: int64 [batch] on the device, below 0 for padding. max_tokens: of the longest sequence, the newest one
    included. A step that is recorded names no requests and knows no lengths: it is carried out whenever it is replayed.
    """

    tiers: Tiers
    rows: torch.Tensor
    newest: torch.Tensor
    max_tokens: int
    request_ids: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    state: StepState = StepState.OPEN

    def __post_init__(self) -> None:
        device = self.tiers.device
        self.batch = locate_newest(device, self.rows, self.newest)
        self.seq_lens = self.newest + 1
        self._page_table = device.page_table[self.rows.clamp(min=0), : -(-self.max_tokens // device.index_page_size)]
        self._plans: dict[int, GroupPlan] = {}
        self._to_verify: list[SwappedIn] = []

    @property
    def is_recorded(self) -> bool:
        """Whether nothing of it is carried out before it is replayed."""
        return self.lengths is None

    def append(self, layer: int, items: torch.Tensor) -> None:
        """Store the new tokens' KV items of one layer, [batch, item_dim], where swap-in will say that they are."""
        self._check_open()
        self.tiers.backend.store_items(layer, self.batch, items)

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' index keys of one index layer, [batch, index_dim]."""
        self._check_open()
        self.tiers.backend.store_index_keys(index_layer, self.batch, keys)

    def index_pages(self, index_layer: int) -> IndexPages:
        """The index keys to score against, new tokens included."""
        return IndexPages(self.tiers.device.index_keys[index_layer], self._page_table, self.seq_lens, self.lengths)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Make the positions that a layer selected resident, and return their device slots.

        positions: int64 [batch, k], -1 where there is none. Returns int64 of the same shape, -1 for -1. The first layer
        of an index layer's group decides hits and victims; the others must select the same and only copy.
        """
        self._check_open()
        index_layer = self.tiers.host.layout.index_layer_of[layer]
        layers = self.tiers.layers_of_group[index_layer]
        if layer == layers[0] and index_layer not in self._plans:
            plan = self.tiers.backend.resolve(index_layer, self.batch, positions)
            self._plans[index_layer] = GroupPlan(plan, list(layers))
        group = self._plans.get(index_layer)
        if group is None or layer not in group.to_fetch:
            raise StepError(f"layer {layer} swapped in twice in a step, or before layer {layers[0]} of its group")
        self.tiers.backend.fetch(group.plan, layer)
        group.to_fetch.remove(layer)
        if self.tiers.verify:
            self._to_verify.append(SwappedIn(layer, positions, group.plan.slots))
            if not self.is_recorded:
                self.verify()
                self._to_verify.clear()
        return group.plan.slots

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's device items, [num_slots, item_dim]."""
        return self.tiers.device.kv[layer]

    def finish(self) -> None:
        """Copy the new tokens to the host, all layers at once."""
        self._check_open()
        self._complete_fetches()
        self.tiers.backend.backup(self.batch)
        self.state = StepState.FINISHED

    def abandon(self) -> None:
        """Leave it where it is, if it is open, with what it made resident really there."""
        if self.state is StepState.OPEN:
            self._complete_fetches()
            self.state = StepState.ABANDONED

    def verify(self) -> None:
        """Check what was swapped in since the last check; for a recorded step, what its last replay swapped in.

        Nothing to do unless the tiers are to be verified. Raises SwapInMismatchError.
        """
        for swapped in self._to_verify:
            verify_swap_in(
                self.tiers.host, self.tiers.device, self.batch, swapped.layer, swapped.positions, swapped.slots
            )

    def _check_open(self) -> None:
        if self.state is not StepState.OPEN:
            raise StepError("this decode step was finished or abandoned")

    def _complete_fetches(self) -> None:
        """Fetch in the layers that did not ask for it, since residency says that all layers of a group have the item.

        After a step that ran through there is nothing to do.
        """
        for group in self._plans.values():
            while group.to_fetch:
                self.tiers.backend.fetch(group.plan, group.to_fetch[0])
                group.to_fetch.pop(0)
        self._plans.clear()  # a recorded step lives on, and plans are large
