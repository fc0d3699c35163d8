"""One decode step: what the model reads from the KV tiers, and writes to them."""

from dataclasses import dataclass

import torch

from hisparse.swap_in import StepBatch, SwapInBackend, SwapInPlan
from hisparse.verify import verify_swap_in
from kernels.operands import PagedKeys


class StepError(RuntimeError):
    """A decode step was used out of turn."""


@dataclass(eq=False)
class DecodeStep:
    """The KV tiers as one decode step sees them: the decode cache that the model runs against.

    The model stores the new tokens' items and index keys in each layer and swaps in what it selected; `finish` copies
    the new tokens to the host. On a device everything is queued in the order of the calls. A recorded step is carried
    out again at each replay, for the values that `rows` and `newest` hold then; its tensors must stay.

    to_be_verified: check every swap-in against the host copy, which is slow. rows, newest: int64 [batch] on the device,
    below 0 for padding. max_tokens: of the longest sequence, the newest included. lengths: sequence lengths on the
    host, None where only the device knows them.
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
        self.backend.store_items(layer, self.batch, items)

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' index keys of one index layer, uint8 [batch, index_key_bytes]."""
        self.backend.store_index_keys(index_layer, self.batch, keys)

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
        """Compare what was swapped in, by the last replay if the step is recorded, with the host copy.

        A layer's hot buffer is changed by its own swap-in only, so what it holds now is what attention read. Waits for
        the device. Does nothing unless the step is to be verified. Raises SwapInMismatchError.
        """
        for layer, positions, slots in self._to_verify:
            verify_swap_in(self.backend.host, self.backend.device, self.batch, layer, positions, slots)
