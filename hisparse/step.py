"""One decode step: what the model reads from the KV tiers, and writes to them."""

from dataclasses import dataclass

import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.swap_in import StepBatch, SwapInBackend, SwapInPlan
from kernels.operands import PagedKeys
from kvcache.host_pool import HostKVPool


class StepError(RuntimeError):
    """A decode step was used out of turn."""


class SwapInMismatchError(RuntimeError):
    """A selected position is not where swap-in said it is: invariant 2 is broken."""


@dataclass(eq=False)
class DecodeStep:
    """The decode cache that the model runs against in one step.

    In each layer the model stores the new tokens' items and index keys and swaps in what it selected; `finish` copies
    the new tokens to the host. A device carries everything out in the order of the calls. A recorded step is carried
    out again at each replay, for the values that `rows` and `newest` hold then; its tensors must stay.

    to_be_verified: check every swap-in against the host copy, which is slow. rows, newest: int64 [batch] on the device,
    below 0 for padding. max_tokens: of the longest sequence, the newest included. lengths: of sequences, on the host;
    None if only the device knows them.
    """

    backend: SwapInBackend
    to_be_verified: bool
    rows: torch.Tensor
    newest: torch.Tensor
    max_tokens: int
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        device = self.backend.device
        exists, row, position = self.rows >= 0, self.rows.clamp(min=0), self.newest.clamp(min=0)
        hot = position.clamp(max=device.device_buffer_size)
        self.batch = StepBatch(
            rows=self.rows,
            newest=self.newest,
            newest_slots=torch.where(exists, device.hot_slots(row, hot), -1),
            newest_index_rows=torch.where(exists, device.index_rows(row, position), -1),
            newest_host_slots=torch.where(exists, device.host_slot_of[row, position], -1),
        )
        self.seq_lens = self.newest + 1
        self._page_table = device.page_table[row, : -(-self.max_tokens // device.index_page_size)]
        self._plans: dict[int, SwapInPlan] = {}
        self._to_fetch: list[int] = []
        """Layers whose selection is resolved, but whose items were not fetched yet."""
        self._to_verify: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Layer, positions and slots of each swap-in, if they are to be verified."""

    def append(self, layer: int, items: torch.Tensor) -> None:
        """Store the new tokens' KV items of one layer, uint8 [batch, item_bytes], in their hot slots."""
        self.backend.store(items, self.backend.device.kv[layer], self.batch.newest_slots)

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' index keys of one index layer, uint8 [batch, index_key_bytes]."""
        self.backend.store(keys, self.backend.device_index_keys[index_layer], self.batch.newest_index_rows)

    def index_pages(self, index_layer: int) -> PagedKeys:
        """The index keys to score against, new tokens included."""
        return PagedKeys(self.backend.device.index_keys[index_layer], self._page_table, self.seq_lens, self.lengths)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Make the positions that a layer selected resident, and return their device slots.

        positions: int64 [batch, k], -1 where there is none. Returns int64 of the same shape, -1 for -1. The first layer
        of an index layer's group decides hits and victims; the others must select the same and only copy. Raises
        StepError for a layer out of turn.
        """
        layout = self.backend.host.layout
        index_layer = layout.index_layer_of[layer]
        layers = layout.layers_of(index_layer)
        if layer == layers[0] and index_layer not in self._plans:
            self._plans[index_layer] = self.backend.resolve(index_layer, self.batch, positions)
            self._to_fetch += layers
        if layer not in self._to_fetch:
            raise StepError(f"layer {layer} swapped in twice in a step, or before layer {layers[0]} of its group")
        plan = self._plans[index_layer]
        self.backend.fetch(plan, layer)
        self._to_fetch.remove(layer)
        if self.to_be_verified:
            self._to_verify.append((layer, positions, plan.slots))
        return plan.slots

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's device items, uint8 [num_slots, item_bytes]."""
        return self.backend.device.kv[layer]

    def finish(self) -> None:
        """Copy the new tokens to the host, all layers at once. Raises StepError if a layer swapped nothing in."""
        if self._to_fetch:
            raise StepError(f"layers {self._to_fetch} did not swap in what residency says that they have")
        self.backend.backup(self.batch)
        self._plans.clear()  # a recorded step lives on, and plans are large

    def verify(self) -> None:
        """If the step is to be verified: compare what was swapped in (by the last replay) with the host copy.

        Only a layer's own swap-in changes its hot buffer, so it holds what attention read. Waits for the device. Raises
        SwapInMismatchError.
        """
        for layer, positions, slots in self._to_verify:
            verify_swap_in(self.backend.host, self.backend.device, self.batch, layer, positions, slots)


def verify_swap_in(
    host: HostKVPool, device: DeviceKVPool, batch: StepBatch, layer: int, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compare, byte by byte, every selected position's device slot with its host copy or the newest slot.

    positions, slots: int64 [batch, k], what the layer selected and swap-in's answer, -1 where there is none.
    Raises ValueError if a position is beyond its row's newest, and SwapInMismatchError, naming the first, if a slot is
    not the position's.
    """
    if bool((positions > batch.newest[:, None]).any()):
        raise ValueError("a position beyond the newest was selected")
    is_newest = positions == batch.newest[:, None]
    expected_newest = batch.newest_slots[:, None].expand_as(slots)
    older = (positions >= 0) & ~is_newest
    wrong = torch.where(is_newest, slots != expected_newest, (slots < 0) != (positions < 0))

    entry_batch, entry_place = (older & ~wrong).nonzero(as_tuple=True)
    host_slots = device.host_slot_of[batch.rows[entry_batch], positions[entry_batch, entry_place]]
    on_device = device.kv[layer][slots[entry_batch, entry_place]].cpu()
    on_host = host.kv[layer][host_slots.cpu()]
    wrong[entry_batch, entry_place] = (on_device != on_host).any(1).to(wrong.device)
    if bool(wrong.any()):
        at, place = (int(index) for index in wrong.nonzero()[0])
        raise SwapInMismatchError(
            f"layer {layer}, row {int(batch.rows[at])}: position {int(positions[at, place])} is not what lies at "
            f"device slot {int(slots[at, place])} ({int(wrong.sum())} such entries)"
        )
