"""Moving items between the tiers: what a backend does, and the CPU backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from base.device import upload
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from kvcache.host_pool import HostKVPool


@dataclass(frozen=True)
class Span:
    """Consecutive positions of each row of a batch: counts[b] of them from first[b] on. int64 [batch], on the device.

    counts: at most `width`, 0 for none.
    """

    first: torch.Tensor
    counts: torch.Tensor
    width: int

    def positions(self) -> torch.Tensor:
        """int64 [batch * width], row by row, -1 where there is none."""
        place = torch.arange(self.width, device=self.first.device)
        return torch.where(place < self.counts[:, None], self.first[:, None] + place, -1).flatten()


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, their queries, and where the tokens that it computes go. All int64, on the device.

    rows: [batch], rows of the device pool, distinct, below 0 for padding, for which nothing is stored, selected or
    copied. newest: [batch], the newest position, with which the row's window begins. identity: [batch], I of
    `hisparse.residency`. queries: query j of a row is at position first + j; `resolve` lowers the counts, in place,
    where queries are cut. stored: the tokens whose KV the step stores. queries and stored lie in the window.

    Of each stored token, [batch * stored.width], -1 for none: stored_slots, its slot in the device pool,
    stored_index_rows, its place in `index_keys.flatten(1, 2)`, stored_host_slots, its slot in the host pool.
    """

    rows: torch.Tensor
    newest: torch.Tensor
    identity: torch.Tensor
    queries: Span
    stored: Span
    stored_slots: torch.Tensor
    stored_index_rows: torch.Tensor
    stored_host_slots: torch.Tensor


@dataclass(frozen=True)
class SwapInPlan:
    """What one resolve decided, for every layer of the index layer's group.

    slots: int64 [batch * queries, k], device slot of every selected position, -1 for -1 and for queries that are cut or
    do not exist. miss_host_slots, miss_device_slots: int64, in a shape of the backend's own, what to copy from and to,
    both -1 for a miss that is a violation.
    """

    slots: torch.Tensor
    miss_host_slots: torch.Tensor
    miss_device_slots: torch.Tensor


@dataclass(frozen=True)
class SwapInCounters:
    """Monotonic totals. Hits and misses are counted once per index layer, bytes once per layer.

    ahead_bytes: those of `bytes` that are copied while earlier layers compute. A step waits for the others.
    ahead_wait_s: how long steps waited for these, estimated from the waits in one group of layers.

    violations: broken invariants. These are selected positions beyond the query's or below -1, which are taken for -1,
    and misses without a host slot or a device slot, for which nothing is copied. Tokens of some running request are
    wrong then. No backend raises for them: a device finds them after the caller has gone on.
    """

    hits: int
    misses: int
    bytes: int
    violations: int
    ahead_bytes: int = 0
    ahead_wait_s: float = 0.0


@dataclass(frozen=True)
class StagedKV:
    """The KV of a prompt that was computed on this node, in device pages.

    kv_rows: per layer, uint8 [num_rows, item_bytes]. index_rows: per index layer, uint8 [num_rows, index_key_bytes].
    rows: int64 [num_tokens], the row of each position. release: gives the pages back; called exactly once.
    """

    kv_rows: Sequence[torch.Tensor]
    index_rows: Sequence[torch.Tensor]
    rows: torch.Tensor
    release: Callable[[], None]


class SwapInBackend(ABC):
    """Carries out what the coordinator decides. All backends agree on every hit, victim and slot.

    Calls other than `stage` take effect on the device in their order. Others may read or write the host tier only after
    a `drain`.
    """

    def __init__(self, host: HostKVPool, device: DeviceKVPool, residency: Residency) -> None:
        self.host = host
        self.device = device
        self.residency = residency
        self.device_index_keys = device.index_keys.flatten(1, 2)
        self._entries = torch.arange(device.max_requests * device.window, device=device.device)

    @abstractmethod
    def resolve(self, index_layer: int, batch: StepBatch, positions: torch.Tensor) -> SwapInPlan:
        """Decide cuts, hits and victims by the policy in `hisparse.residency`, and lower `batch.queries.counts`.

        positions: int64 [batch * queries.width, k], what each query selects. What it holds for a query that does not
        exist is ignored.
        """

    @abstractmethod
    def fetch(self, plan: SwapInPlan, layer: int) -> None:
        """Copy the plan's missing items of one layer from host to device. Once per plan and layer."""

    @abstractmethod
    def drain(self) -> None:
        """Return when all that was asked for so far, `stage` aside, has been carried out."""

    @abstractmethod
    def counters(self) -> SwapInCounters:
        """What was counted so far; what is not carried out yet may be missing. Any thread may ask."""

    @abstractmethod
    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, from_slots: torch.Tensor, to_slots: torch.Tensor
    ) -> None:
        """Copy in every layer the items at `from_slots` to `to_slots`, which are -1 for padding.

        source, target: uint8 [num_layers, slots, bytes], contiguous within a layer. from_slots, to_slots: int64 [n] on
        the device.
        """

    def store(self, values: torch.Tensor, layer: torch.Tensor, slots: torch.Tensor) -> None:
        """Write items or index keys, uint8 [batch, bytes], to these slots of one layer, -1 for padding."""
        self._copy(values.contiguous()[None], layer[None], self._entries[: len(values)], slots)

    def backup(self, batch: StepBatch) -> None:
        """Copy the stored items and index keys, all layers, from device to host."""
        host, device = self.host, self.device
        self._copy(device.kv, host.kv, batch.stored_slots, batch.stored_host_slots)
        self._copy(self.device_index_keys, host.index_keys, batch.stored_index_rows, batch.stored_host_slots)

    def preload(self, row: int, num_tokens: int) -> None:
        """Copy a short request's items, all layers, from host to hot indices 0 .. num_tokens - 1."""
        to_slots = self.device.hot_slots(row, torch.arange(num_tokens, device=self.device.device))
        self._copy(self.host.kv, self.device.kv, self.device.host_slot_of[row, :num_tokens], to_slots)

    def fill(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Copy items, all layers, from host slots to hot slots. runs: the first host slot of each, its first hot slot,
        and its length.

        Runs on the copy stream, in parallel to the other calls. A device's copy engine carries it out, which takes no
        processor from the step.
        """
        for source, target, count in runs:
            for from_layer, to_layer in zip(self.host.kv, self.device.kv, strict=True):
                to_layer[target : target + count].copy_(from_layer[source : source + count], non_blocking=True)

    def catch_up(self, row: int, first: int, hot_slots: npt.NDArray[np.int64]) -> None:
        """Copy the items, all layers, of a row's positions from `first` on from host to hot slots (int64 [n])."""
        to_slots = upload(hot_slots, torch.empty(len(hot_slots), dtype=torch.int64, device=self.device.device))
        from_slots = self.device.host_slot_of[row, first : first + len(hot_slots)]
        self._copy(self.host.kv, self.device.kv, from_slots, to_slots)

    def load_index_keys(self, row: int, num_tokens: int) -> None:
        """Copy a request's index keys, all index layers, from host to its index pages."""
        from_slots = self.device.host_slot_of[row, :num_tokens]
        to_slots = self.device.index_rows(row, torch.arange(num_tokens, device=self.device.device))
        self._copy(self.host.index_keys, self.device_index_keys, from_slots, to_slots)

    def stage(self, staged: StagedKV, host_slots: npt.NDArray[np.int64]) -> None:
        """Copy a prompt's items and index keys from device pages to host slots (int64 [num_tokens]).

        Runs on the copy stream, in parallel to the other calls.
        """
        to_slots = upload(host_slots, torch.empty_like(staged.rows))
        for tier, pages in ((self.host.kv, staged.kv_rows), (self.host.index_keys, staged.index_rows)):
            for layer, rows in enumerate(pages):
                self._copy(rows.contiguous()[None], tier[layer, None], staged.rows, to_slots)


class CpuSwapIn(SwapInBackend):
    """Both tiers in the memory of this machine, copied by torch."""

    def __init__(self, host: HostKVPool, device: DeviceKVPool, residency: Residency) -> None:
        super().__init__(host, device, residency)
        self._hits = self._misses = self._bytes = self._violations = 0

    def resolve(self, index_layer: int, batch: StepBatch, positions: torch.Tensor) -> SwapInPlan:
        queries, k = batch.queries.width, positions.shape[1]
        present = (batch.rows >= 0).nonzero().squeeze(1)
        rows, newest, valid = batch.rows[present], batch.newest[present], batch.queries.counts[present]
        last = batch.queries.positions().view(-1, queries, 1)[present]
        wanted = torch.where(last >= 0, positions.view(-1, queries, k)[present], -1)
        selected = torch.where((wanted >= 0) & (wanted <= last), wanted, -1)
        plan = self.residency.resolve(index_layer, rows, selected, newest, valid, batch.identity[present])
        batch.queries.counts[present] = plan.valid
        miss_rows = rows[plan.miss_batch]
        host_slots = self.device.host_slot_of[miss_rows, plan.miss_positions]
        device_slots = self.device.hot_slots(miss_rows, plan.miss_hot)
        exists = (host_slots >= 0) & (device_slots >= 0)
        self._hits += plan.hits
        self._misses += plan.misses
        self._violations += int((selected != wanted).sum()) + int((~exists).sum())
        hot_slots = self.device.hot_slots(rows[:, None, None], plan.hot.clamp(min=0))
        slots = torch.full_like(positions, -1)
        slots.view(-1, queries, k)[present] = torch.where(plan.hot >= 0, hot_slots, -1)
        return SwapInPlan(
            slots=slots,
            miss_host_slots=torch.where(exists, host_slots, -1),
            miss_device_slots=torch.where(exists, device_slots, -1),
        )

    def fetch(self, plan: SwapInPlan, layer: int) -> None:
        exists = plan.miss_host_slots >= 0
        from_slots, to_slots = plan.miss_host_slots[exists], plan.miss_device_slots[exists]
        self._copy(self.host.kv[layer, None], self.device.kv[layer, None], from_slots, to_slots)
        self._bytes += len(exists) * self.host.layout.item_bytes

    def drain(self) -> None:
        """Every call has been carried out when it returns."""

    def counters(self) -> SwapInCounters:
        return SwapInCounters(self._hits, self._misses, self._bytes, self._violations)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, from_slots: torch.Tensor, to_slots: torch.Tensor
    ) -> None:
        exists = to_slots >= 0
        from_slots, to_slots = from_slots[exists], to_slots[exists]
        for from_layer, to_layer in zip(source, target, strict=True):
            to_layer.index_copy_(0, to_slots, from_layer.index_select(0, from_slots))
