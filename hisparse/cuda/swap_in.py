"""The CUDA swap-in backend: the device tier in HBM, the host tier in pinned memory, kernels between them."""

import ctypes
from dataclasses import dataclass

import torch

from base.errors import StartupError
from hisparse.cuda.copy_items import ItemCopier, Items
from hisparse.cuda.launch import DeviceKernel, reads_registered_memory, shared_memory_limit
from hisparse.cuda.specialization import IndexType, SwapInSpecialization, default_block_size, seen_bits
from hisparse.device_pool import DeviceKVPool
from hisparse.host_pool import HostKVPool
from hisparse.residency import Residency
from hisparse.swap_in import StagedKV, StepBatch, SwapInCounters, SwapInPlan

_INDEX_TYPES: dict[torch.dtype, IndexType] = {torch.int32: "int32", torch.int64: "int64"}
_POOLS = ("position_at", "hot_of", "referenced", "hand", "hot_granules", "host_slot_of", "host_items", "device_items")


class _Params(ctypes.Structure):
    """SwapInParams of csrc/request.cuh."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("positions", "rows", "newest"),
            *_POOLS,
            *("slots", "miss_host_slots", "miss_device_slots", "miss_counts", "counters", "max_context", "k"),
        )
    ]


@dataclass(frozen=True)
class CudaSwapInPlan(SwapInPlan):
    """A plan whose miss lists say by `miss_counts` how long they are, instead of being padded.

    miss_counts: int32 [batch], distinct misses; that many entries of each row of `miss_host_slots` and
    `miss_device_slots` are written, the others are undefined. fetched_layer: the one that the resolve fetched, -1 if
    none.
    """

    miss_counts: torch.Tensor
    fetched_layer: int


class CudaSwapIn:
    """Swap-in by one kernel launch per index layer, on torch's current stream.

    `resolve` also fetches the first layer of the index layer's group, which the coordinator asks for next: copies start
    as soon as the misses are known. The group's other layers replay the plan. Nothing waits for the device except
    `drain`, and what a plan holds comes from torch's allocator, so a step may be captured in a CUDA graph.

    A batch may have padding: rows (or newest positions) below 0. Rows and newest positions may be int32 or int64, and
    so may selected positions.

    top_k: the most positions that a layer selects. block_size: threads per block of the kernel, chosen if None. Raises
    StartupError if the kernel would need more shared memory than the device has, or the pools are not what it needs.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DeviceKVPool,
        residency: Residency,
        top_k: int,
        block_size: int | None = None,
    ) -> None:
        if device.device.type != "cuda":
            raise StartupError(f"the cuda backend needs device pools on a CUDA device, found {device.device}")
        self._on = torch.device(
            "cuda", torch.cuda.current_device() if device.device.index is None else device.device.index
        )
        if not reads_registered_memory(self._on):
            raise StartupError(f"{self._on} cannot read pinned host memory at its host address")
        self._host = host
        self._device = device
        self._residency = residency
        self._layout = host.layout
        self._top_k = top_k
        self.block_size = block_size or default_block_size(top_k)
        self._counters = torch.zeros(4, dtype=torch.int64, device=self._on)
        self._reading = torch.cuda.Stream(self._on)  # type: ignore[no-untyped-call]
        self._aligned = _aligned(self._layout.item_bytes, host.kv, device.kv)
        self._items = ItemCopier(self._layout.item_bytes, self._on, self._aligned)
        key_bytes = self._layout.index_key_bytes
        self._index_keys = ItemCopier(key_bytes, self._on, _aligned(key_bytes, host.index_keys, device.index_keys))
        self._entries = torch.arange(device.max_requests, device=self._on)
        self._kernels: dict[tuple[torch.dtype, torch.dtype], DeviceKernel] = {}
        self._clusters: dict[int, int] = self._kernel(torch.int64, torch.int64).cluster_sizes()
        self._params = [self._static_params(index_layer) for index_layer in range(self._layout.num_index_layers)]

    def store_items(self, layer: int, batch: StepBatch, items: torch.Tensor) -> None:
        self._store(self._items, items, self._device.kv[layer], batch.newest_slots)

    def store_index_keys(self, index_layer: int, batch: StepBatch, keys: torch.Tensor) -> None:
        self._store(self._index_keys, keys, self._device.index_keys[index_layer], batch.newest_index_rows)

    def resolve(self, index_layer: int, batch: StepBatch, positions: torch.Tensor) -> CudaSwapInPlan:
        """Decide hits and victims, and fetch the first layer of the group. positions: int32 or int64 [batch, k]."""
        return self.launch(index_layer, batch.rows, batch.newest, positions, fetch=True)

    def launch(
        self,
        index_layer: int,
        rows: torch.Tensor,
        newest: torch.Tensor,
        positions: torch.Tensor,
        *,
        fetch: bool,
        cluster: int | None = None,
    ) -> CudaSwapInPlan:
        """Resolve, and with `fetch` also fetch the first layer of the group.

        rows, newest: int32 or int64 [batch], padding is negative. positions: int32 or int64 [batch, k]. cluster: blocks
        per request, chosen if None.
        """
        size, k = self._check(rows, newest, positions)
        out = torch.empty((3, size, k), dtype=torch.int64, device=self._on)
        miss_counts = torch.empty(size, dtype=torch.int32, device=self._on)
        slots, miss_host_slots, miss_device_slots = out.unbind(0)
        params = self._params[index_layer]
        host_items = params.host_items
        params.host_items = host_items if fetch else 0
        params.positions, params.rows, params.newest = positions.data_ptr(), rows.data_ptr(), newest.data_ptr()
        params.slots, params.miss_counts = out.data_ptr(), miss_counts.data_ptr()
        params.miss_host_slots = params.slots + 8 * size * k
        params.miss_device_slots = params.miss_host_slots + 8 * size * k
        params.k = k
        cluster = cluster or self.cluster_size(size)
        self._kernel(rows.dtype, positions.dtype).launch(params, (size * cluster, 1, 1), cluster)
        params.host_items = host_items
        fetched = self._layout.index_layer_of.index(index_layer) if fetch else -1
        return CudaSwapInPlan(slots, miss_host_slots, miss_device_slots, miss_counts, fetched)

    def cluster_size(self, batch: int) -> int:
        """Blocks per request: as many as let all requests of the batch run at the same time."""
        return max((size for size, running in self._clusters.items() if batch <= running), default=1)

    def fetch(self, plan: SwapInPlan, layer: int) -> None:
        if not isinstance(plan, CudaSwapInPlan):
            raise TypeError(f"the cuda backend fetches by plans of its own, found {type(plan).__name__}")
        if layer == plan.fetched_layer:
            return
        self._items.copy(
            Items(self._host.kv[layer].data_ptr()),
            Items(self._device.kv[layer].data_ptr()),
            plan.miss_host_slots,
            plan.miss_device_slots,
            counts=plan.miss_counts,
            copied_bytes=self._counters.data_ptr() + 2 * self._counters.itemsize,
        )

    def backup(self, batch: StepBatch) -> None:
        host, device = self._host, self._device
        self._items.copy(
            Items.of(device.kv),
            Items.of(host.kv),
            batch.newest_slots,
            batch.newest_host_slots,
            num_layers=self._layout.num_layers,
        )
        self._index_keys.copy(
            Items.of(device.index_keys),
            Items.of(host.index_keys),
            batch.newest_index_rows,
            batch.newest_host_slots,
            num_layers=self._layout.num_index_layers,
        )

    def preload(self, row: int, num_tokens: int) -> None:
        self._items.copy(
            Items.of(self._host.kv),
            Items.of(self._device.kv),
            self._device.host_slot_of[row, :num_tokens],
            self._device.first_hot_slots(row, num_tokens),
            num_layers=self._layout.num_layers,
        )

    def load_index_keys(self, row: int, num_tokens: int) -> None:
        self._index_keys.copy(
            Items.of(self._host.index_keys),
            Items.of(self._device.index_keys),
            self._device.host_slot_of[row, :num_tokens],
            self._device.index_rows(row, num_tokens),
            num_layers=self._layout.num_index_layers,
        )

    def stage(self, staged: StagedKV, host_slots: torch.Tensor) -> None:
        """See SwapInBackend. Runs on torch's current stream, which the copy stream's owner makes current."""
        # A copy from memory that is not pinned would hold the caller up until the stream has come to it.
        to_slots = host_slots.pin_memory().to(self._on, non_blocking=True)
        for copier, tier, pages in (
            (self._items, self._host.kv, staged.kv_rows),
            (self._index_keys, self._host.index_keys, staged.index_rows),
        ):
            for layer, rows in enumerate(pages):
                source, target = Items(rows.contiguous().data_ptr()), Items(tier[layer].data_ptr())
                copier.copy(source, target, staged.rows, to_slots)

    def drain(self) -> None:
        torch.cuda.current_stream(self._on).synchronize()

    def counters(self) -> SwapInCounters:
        """See SwapInBackend.

        Read on a stream of their own, so that a scrape neither waits for the launches of a step nor comes between them.
        """
        with torch.cuda.stream(self._reading):
            hits, misses, num_bytes, violations = self._counters.tolist()
        return SwapInCounters(hits, misses, num_bytes, violations)

    def _store(self, copier: ItemCopier, items: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """By a kernel of ours rather than torch's: it skips padding."""
        items = items.contiguous()
        copier.copy(Items(items.data_ptr()), Items(pool.data_ptr()), self._entries[: len(items)], slots)

    def _check(self, rows: torch.Tensor, newest: torch.Tensor, positions: torch.Tensor) -> tuple[int, int]:
        """The batch and k of a launch. Raises ValueError for what the kernel cannot read."""
        if positions.ndim != 2 or rows.shape != positions.shape[:1] or newest.shape != rows.shape:
            raise ValueError(
                f"expected rows [batch], newest [batch], positions [batch, k], found {tuple(rows.shape)}, "
                f"{tuple(newest.shape)}, {tuple(positions.shape)}"
            )
        size, k = positions.shape
        if not size or not 1 <= k <= self._top_k:
            raise ValueError(f"expected a batch of at least 1 with 1 to {self._top_k} positions, found {size} with {k}")
        if rows.dtype != newest.dtype or not {rows.dtype, positions.dtype} <= _INDEX_TYPES.keys():
            raise ValueError(
                "rows and newest must both be int32 or both int64, positions either, found "
                f"{rows.dtype}, {newest.dtype}, {positions.dtype}"
            )
        for tensor in (rows, newest, positions):
            if not tensor.is_contiguous() or tensor.device != self._on:
                raise ValueError(f"expected contiguous tensors on {self._on}, found one on {tensor.device}")
        return size, k

    def _kernel(self, index_type: torch.dtype, position_type: torch.dtype) -> DeviceKernel:
        key = (index_type, position_type)
        if key not in self._kernels:
            specialization = SwapInSpecialization(
                top_k=self._top_k,
                hot_size=self._residency.device_buffer_size,
                item_bytes=self._layout.item_bytes,
                index_type=_INDEX_TYPES[index_type],
                position_type=_INDEX_TYPES[position_type],
                aligned=self._aligned,
                block_size=self.block_size,
                seen_bits=seen_bits(self._device.max_context),
            )
            self._kernels[key] = DeviceKernel(specialization.fitted(shared_memory_limit(self._on)), self._on)
        return self._kernels[key]

    def _static_params(self, index_layer: int) -> _Params:
        """The parameters that are the same in every launch for an index layer: where its state and items are."""
        layer = self._layout.index_layer_of.index(index_layer)
        residency, device = self._residency, self._device
        return _Params(
            position_at=residency.position_at[index_layer].data_ptr(),
            hot_of=residency.hot_of[index_layer].data_ptr(),
            referenced=residency.referenced[index_layer].data_ptr(),
            hand=residency.hand[index_layer].data_ptr(),
            hot_granules=device.hot_granules.data_ptr(),
            host_slot_of=device.host_slot_of.data_ptr(),
            host_items=self._host.kv[layer].data_ptr(),
            device_items=device.kv[layer].data_ptr(),
            counters=self._counters.data_ptr(),
            max_context=device.max_context,
        )


def _aligned(item_bytes: int, *tiers: torch.Tensor) -> bool:
    return all(Items.of(tier).aligned(item_bytes) for tier in tiers)
