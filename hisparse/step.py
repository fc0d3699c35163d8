"""One decode step: what the model reads from the KV tiers, and writes to them."""

from dataclasses import dataclass

import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.swap_in import Span, StepBatch, SwapInBackend, SwapInPlan
from kernels.operands import PagedKeys
from kvcache.host_pool import HostKVPool


class StepError(RuntimeError):
    """A decode step was used out of turn."""


class SwapInMismatchError(RuntimeError):
    """A selected position is not where swap-in said it is: invariant 2 is broken."""


@dataclass(eq=False)
class DecodeStep:
    """The decode cache that the model runs against in one forward pass.

    In each layer the model stores the new tokens' items and index keys and swaps in what its queries selected; `finish`
    copies the new tokens to the host. A device carries everything out in the order of the calls. A recorded step is
    carried out again at each replay, for the values that rows, newest, queries and stored hold then; its tensors must
    stay.

    to_be_verified: check every swap-in against the host copy, which is slow. rows, newest: int64 [batch] on the device,
    below 0 for padding. queries: each has one place in a batch of batch * queries.width; swap-in lowers its counts, in
    place, where queries are cut. stored: the new tokens. layers: those that the pass computes, whole groups.
    max_tokens: of the longest sequence, up to its last query. lengths: of the sequences up to each query, on the host;
    None if only the device knows them. backs_up: whether `finish` copies the new tokens to the host.
    """

    backend: SwapInBackend
    to_be_verified: bool
    rows: torch.Tensor
    newest: torch.Tensor
    queries: Span
    stored: Span
    layers: range
    max_tokens: int
    lengths: tuple[int, ...] | None = None
    backs_up: bool = True

    def __post_init__(self) -> None:
        device = self.backend.device
        row = self.rows.clamp(min=0)[:, None]
        stored = self.stored.positions().view(-1, self.stored.width)
        position = stored.clamp(min=0)

        def where_stored(places: torch.Tensor) -> torch.Tensor:
            return torch.where(stored >= 0, places, -1).flatten()

        self.batch = StepBatch(
            rows=self.rows,
            newest=self.newest,
            identity=device.identity[row.flatten()],
            queries=self.queries,
            stored=self.stored,
            stored_slots=where_stored(device.hot_slots(row, device.window_hot(row, self.newest[:, None], position))),
            stored_index_rows=where_stored(device.index_rows(row, position)),
            stored_host_slots=where_stored(device.host_slot_of[row, position]),
        )
        self.seq_lens = self.queries.positions() + 1
        pages = -(-self.max_tokens // device.index_page_size)
        self._page_table = device.page_table[row, :pages].expand(-1, self.queries.width, -1).flatten(0, 1)
        self._plans: dict[int, SwapInPlan] = {}
        self._to_swap_in = list(self.layers)
        self._to_verify: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Layer, positions and slots of each swap-in, if they are to be verified."""

    def append(self, layer: int, items: torch.Tensor) -> None:
        """Store the new tokens' KV items of one layer, uint8 [batch * stored.width, item_bytes], in their hot slots."""
        self.backend.store(items, self.backend.device.kv[layer], self.batch.stored_slots)

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        """Store the new tokens' keys of one index layer, uint8 [batch * stored.width, index_key_bytes]."""
        self.backend.store(keys, self.backend.device_index_keys[index_layer], self.batch.stored_index_rows)

    def index_pages(self, index_layer: int) -> PagedKeys:
        """The index keys that each query scores, those of new tokens up to its own included."""
        return PagedKeys(
            self.backend.device.index_keys[index_layer],
            self._page_table,
            self.seq_lens,
            self.lengths,
            rows_each=self.queries.width,
        )

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Make the positions that a layer's queries selected resident, and return their device slots.

        positions: int64 [batch * queries.width, k], -1 where there is none. Returns int64 of the same shape, -1 for -1
        and for queries that are cut. The first layer of an index layer's group decides cuts, hits and victims; the
        others must select the same and only copy. Raises StepError for a layer out of turn.
        """
        layout = self.backend.host.layout
        index_layer = layout.index_layer_of[layer]
        first = layout.layers_of(index_layer)[0]
        if layer not in self._to_swap_in or (layer != first and index_layer not in self._plans):
            raise StepError(f"layer {layer} swapped in twice in a step, or before layer {first} of its group")
        if layer == first:
            self._plans[index_layer] = self.backend.resolve(index_layer, self.batch, positions)
        plan = self._plans[index_layer]
        self.backend.fetch(plan, layer)
        self._to_swap_in.remove(layer)
        if self.to_be_verified:
            self._to_verify.append((layer, positions, plan.slots))
        return plan.slots

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's device items, uint8 [num_slots, item_bytes]."""
        return self.backend.device.kv[layer]

    def finish(self) -> None:
        """Copy the new tokens to the host, all layers of the pools at once, if the step backs up.

        Raises StepError if one of its layers swapped nothing in.
        """
        if self._to_swap_in:
            raise StepError(f"layers {self._to_swap_in} did not swap in what residency says that they have")
        if self.backs_up:
            self.backend.backup(self.batch)
        self._plans.clear()  # a recorded step lives on, and plans are large

    def verify(self) -> None:
        """If the step is to be verified: compare what was swapped in (by the last replay) with the host copy.

        Only a layer's own swap-in changes its hot buffer, so it holds what attention read, until the layer swaps in
        again in another pass. Waits for the device. Raises SwapInMismatchError.
        """
        for layer, positions, slots in self._to_verify:
            verify_swap_in(self.backend.host, self.backend.device, self.batch, layer, positions, slots)


def verify_swap_in(
    host: HostKVPool, device: DeviceKVPool, batch: StepBatch, layer: int, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compare, byte by byte, every selected position's device slot with its host copy or the slot of the own token.

    positions, slots: int64 [batch * queries, k], what the layer selected and swap-in's answer, -1 where there is none.
    Queries that do not exist or were cut by any layer are left out. Raises ValueError if a position is beyond its
    query's, and SwapInMismatchError, naming the first, if a slot is not the position's.
    """
    last = batch.queries.positions()
    exists = (last >= 0).nonzero().squeeze(1)
    entry = exists // batch.queries.width
    rows, newest = batch.rows[entry, None], batch.newest[entry, None]
    positions, slots = positions[exists], slots[exists]
    if bool((positions > last[exists, None]).any()):
        raise ValueError("a position beyond its query's was selected")
    is_own = positions >= newest
    own_slots = device.hot_slots(rows, device.window_hot(rows, newest, positions.clamp(min=0)))
    older = (positions >= 0) & ~is_own
    wrong = torch.where(is_own, slots != own_slots, (slots < 0) != (positions < 0))

    at, place = (older & ~wrong).nonzero(as_tuple=True)
    host_slots = device.host_slot_of[rows[at, 0], positions[at, place]]
    on_device = device.kv[layer][slots[at, place]].cpu()
    on_host = host.kv[layer][host_slots.cpu()]
    wrong[at, place] = (on_device != on_host).any(1).to(wrong.device)
    if bool(wrong.any()):
        query, first = (int(index) for index in wrong.nonzero()[0])
        raise SwapInMismatchError(
            f"layer {layer}, row {int(rows[query, 0])}: position {int(positions[query, first])} is not what lies at "
            f"device slot {int(slots[query, first])} ({int(wrong.sum())} such entries)"
        )
