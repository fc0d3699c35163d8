"""The CUDA swap-in backend: the device tier in HBM, the host tier in pinned memory, kernels between them."""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from base.errors import StartupError
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.swap_in import Span, StepBatch, SwapInBackend, SwapInCounters, SwapInPlan
from kernels.copy_items import CopySpecialization, are_aligned, copy_items
from kernels.launch import DeviceKernel, kernel_on, reads_registered_memory, shared_memory_limit
from kernels.swap_in import SwapInParams, SwapInSpecialization, default_block_size, seen_bits
from kernels.wait_time import WaitTimer
from kvcache.host_pool import HostKVPool

_AHEAD_BLOCKS = 16
"""Fewer copy for longer than earlier layers compute, and more slow these down (docs/benchmarks.md)."""
_FEW_QUERIES = 2
"""Up to this number `resolve` fetches all layers of a group: it takes no longer than a fork and the waits for it."""
_BYTES, _AHEAD_BYTES = 2, 4
"""Places in the counters; the first four are `Counter` of csrc/request.cuh."""


@dataclass(frozen=True)
class CudaSwapInPlan(SwapInPlan):
    """miss_counts: int32 [batch], distinct misses; that many entries of each row of `miss_host_slots` and
    `miss_device_slots`, int64 [batch, queries * k], are written, the others are undefined. fetched: the layers that the
    resolve fetched. ahead: of each layer that is copied ahead, what is recorded after its copy.
    """

    miss_counts: torch.Tensor
    fetched: Sequence[int]
    ahead: dict[int, torch.cuda.Event] = field(default_factory=dict)


class CudaSwapIn(SwapInBackend):
    """Swap-in by one kernel launch per index layer, on torch's current stream.

    `resolve` also fetches the first layer of the index layer's group, which the step asks for next, so copies start as
    soon as the misses are known. The group's other layers are copied ahead, one after the other, on a stream of their
    own with few blocks; `fetch` has the step's stream wait for a layer's copy. For one or two queries `resolve` fetches
    all layers of the group. Only `drain` waits for the device, and a plan's tensors come from torch's allocator, so a
    step may be captured in a CUDA graph.

    top_k: the most positions that a query selects. block_size: threads per block of the kernel, chosen if None. Raises
    StartupError if the kernel would need more shared memory than the device has, or the pools are not what it needs.

    There is a kernel for each number of queries that a window of the pools may have: one, or one more than the drafts
    of which the window has room for twice as many.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DeviceKVPool,
        residency: Residency,
        top_k: int,
        block_size: int | None = None,
    ) -> None:
        index = torch.cuda.current_device() if device.device.index is None else device.device.index
        self._on = torch.device("cuda", index)
        if not reads_registered_memory(self._on):
            raise StartupError(f"{self._on} cannot read pinned host memory at its host address")
        super().__init__(host, device, residency)
        self._layout = host.layout
        self._top_k = top_k
        self._block_size = block_size
        self._counters = torch.zeros(5, dtype=torch.int64, device=self._on)
        self._reading = torch.cuda.Stream(self._on)  # type: ignore[no-untyped-call]
        self._ahead = torch.cuda.Stream(self._on)  # type: ignore[no-untyped-call]
        # One group stands for all: to measure every wait takes longer than the waits.
        self._wait_timer = WaitTimer(self._on)
        groups = [self._layout.layers_of(index_layer)[1:] for index_layer in range(self._layout.num_index_layers)]
        self._copied_ahead = [layers for layers in groups if layers]
        self._timed = self._copied_ahead[len(self._copied_ahead) // 2] if self._copied_ahead else ()
        for pools in ((host.kv, device.kv), (host.index_keys, self.device_index_keys)):
            kernel_on(self._on, CopySpecialization(pools[0].shape[-1], are_aligned(*pools)))
        self._kernels = {queries: self._kernel(queries) for queries in range(1, device.window // 2 + 2)}
        self._clusters = {queries: kernel.cluster_sizes() for queries, kernel in self._kernels.items()}
        self._params = [self._static_params(index_layer) for index_layer in range(self._layout.num_index_layers)]

    def resolve(self, index_layer: int, batch: StepBatch, positions: torch.Tensor) -> CudaSwapInPlan:
        """See SwapInBackend; also fetches the group's first layer, or all."""
        layers = self._layout.layers_of(index_layer)
        fetch = len(layers) if len(positions) <= _FEW_QUERIES else 1
        plan = self.launch(
            index_layer, batch.rows, batch.newest, batch.queries, positions, fetch=fetch, identity=batch.identity
        )
        if ahead := layers[fetch:]:
            self._copy_ahead(plan, ahead)
        return plan

    def launch(
        self,
        index_layer: int,
        rows: torch.Tensor,
        newest: torch.Tensor,
        queries: Span,
        positions: torch.Tensor,
        *,
        fetch: int,
        identity: torch.Tensor,
        cluster: int | None = None,
    ) -> CudaSwapInPlan:
        """Resolve, and fetch the misses in the first `fetch` layers of the group.

        rows, newest, identity: int64 [batch], see StepBatch. queries: where the window is 1, each row has one, at its
        newest position. positions: int64 [batch * queries.width, k]. cluster: blocks per request, chosen if None.
        Raises ValueError for tensors that the kernel cannot read.
        """
        size, k = self._check(rows, newest, identity, queries, positions)
        width = queries.width * k
        out = torch.empty((3, size, width), dtype=torch.int64, device=self._on)
        miss_counts = torch.empty(size, dtype=torch.int32, device=self._on)
        slots, miss_host_slots, miss_device_slots = out.unbind(0)
        params = self._params[index_layer]
        params.fetched_layers = fetch
        params.positions, params.rows, params.newest = positions.data_ptr(), rows.data_ptr(), newest.data_ptr()
        params.identity = identity.data_ptr()
        params.first, params.valid = queries.first.data_ptr(), queries.counts.data_ptr()
        params.slots, params.miss_counts = out.data_ptr(), miss_counts.data_ptr()
        params.miss_host_slots = params.slots + 8 * size * width
        params.miss_device_slots = params.miss_host_slots + 8 * size * width
        params.k = k
        cluster = cluster or self.cluster_size(size, queries.width)
        self._kernels[queries.width].launch(params, (size * cluster, 1, 1), cluster)
        fetched = self._layout.layers_of(index_layer)[:fetch]
        return CudaSwapInPlan(slots.view(-1, k), miss_host_slots, miss_device_slots, miss_counts, fetched)

    def cluster_size(self, batch: int, queries: int = 1) -> int:
        """Blocks per request: as many as let all requests of the batch run at the same time."""
        return max((size for size, running in self._clusters[queries].items() if batch <= running), default=1)

    def block_size(self, queries: int = 1) -> int:
        """Threads per block."""
        return self._block_size or default_block_size(queries * self._top_k)

    def fetch(self, plan: SwapInPlan, layer: int) -> None:
        assert isinstance(plan, CudaSwapInPlan)
        if layer in plan.ahead:
            with self._wait_timer.wait() if layer in self._timed else nullcontext():
                torch.cuda.current_stream(self._on).wait_event(plan.ahead[layer])
        elif layer not in plan.fetched:
            self._copy_misses(plan, layer)

    def _copy_ahead(self, plan: CudaSwapInPlan, layers: Sequence[int]) -> None:
        """The plan's tensors outlive the copies: the step keeps plans until all layers have waited for theirs."""
        self._ahead.wait_stream(torch.cuda.current_stream(self._on))
        with torch.cuda.stream(self._ahead):
            for layer in layers:
                self._copy_misses(plan, layer, counter=_AHEAD_BYTES, most_blocks=_AHEAD_BLOCKS)
                plan.ahead[layer] = self._ahead.record_event()

    def _copy_misses(
        self, plan: CudaSwapInPlan, layer: int, counter: int = _BYTES, most_blocks: int | None = None
    ) -> None:
        copy_items(
            self.host.kv[layer : layer + 1],
            self.device.kv[layer : layer + 1],
            plan.miss_host_slots,
            plan.miss_device_slots,
            counts=plan.miss_counts,
            copied_bytes=self._counters[counter].data_ptr(),
            most_blocks=most_blocks,
        )

    def drain(self) -> None:
        torch.cuda.current_stream(self._on).synchronize()

    def counters(self) -> SwapInCounters:
        """See SwapInBackend.

        Read on a stream of their own, so that a scrape neither waits for the launches of a step nor comes between them.
        """
        with torch.cuda.stream(self._reading):
            hits, misses, in_step, violations, ahead = self._counters.tolist()
            waited_s = self._wait_timer.waited.item() / 1e9
        waited_s *= sum(map(len, self._copied_ahead)) / max(1, len(self._timed))
        return SwapInCounters(hits, misses, in_step + ahead, violations, ahead, waited_s)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, from_slots: torch.Tensor, to_slots: torch.Tensor
    ) -> None:
        copy_items(source, target, from_slots, to_slots)

    def _check(
        self,
        rows: torch.Tensor,
        newest: torch.Tensor,
        identity: torch.Tensor,
        queries: Span,
        positions: torch.Tensor,
    ) -> tuple[int, int]:
        """The batch and k of a launch. Raises ValueError for what the kernel cannot read."""
        of_rows = [rows, newest, identity, queries.first, queries.counts]
        size, names = len(rows), "rows, newest, identity, queries.first and queries.counts"
        if any(t.shape != (size,) for t in of_rows) or positions.ndim != 2 or len(positions) != size * queries.width:
            raise ValueError(
                f"expected {names} [batch], positions [batch * {queries.width}, k], found "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in (*of_rows, positions))}"
            )
        k = positions.shape[1]
        if not size or not 1 <= k <= self._top_k:
            raise ValueError(f"expected a batch of at least 1 with 1 to {self._top_k} positions, found {size} with {k}")
        if queries.width not in self._kernels:
            raise ValueError(
                f"expected 1 to {max(self._kernels)} queries, the window being {self.device.window}, "
                f"found {queries.width}"
            )
        for tensor in (*of_rows, positions):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous() or tensor.device != self._on:
                raise ValueError(
                    f"expected contiguous tensors of int64 on {self._on}, found one of {tensor.dtype} on "
                    f"{tensor.device} with strides {tensor.stride()}"
                )
        return size, k

    def _kernel(self, queries: int) -> DeviceKernel:
        specialization = SwapInSpecialization(
            top_k=self._top_k,
            hot_size=self.residency.device_buffer_size,
            item_bytes=self._layout.item_bytes,
            aligned=are_aligned(self.host.kv, self.device.kv),
            block_size=self.block_size(queries),
            seen_bits=seen_bits(self.device.max_context),
            queries=queries,
            window=self.device.window,
        )
        return DeviceKernel(specialization.fitted(shared_memory_limit(self._on)), self._on)

    def _static_params(self, index_layer: int) -> ctypes.Structure:
        """The parameters that are the same in every launch for an index layer: where its state and items are."""
        layer = self._layout.index_layer_of.index(index_layer)
        residency, device = self.residency, self.device
        return SwapInParams(
            position_at=residency.position_at[index_layer].data_ptr(),
            hot_of=residency.hot_of[index_layer].data_ptr(),
            referenced=residency.referenced[index_layer].data_ptr(),
            hand=residency.hand[index_layer].data_ptr(),
            hot_granules=device.hot_granules.data_ptr(),
            row_granules=device.hot_granules.shape[1],
            host_slot_of=device.host_slot_of.data_ptr(),
            host_items=self.host.kv[layer].data_ptr(),
            device_items=device.kv[layer].data_ptr(),
            counters=self._counters.data_ptr(),
            max_context=device.max_context,
            host_layer_bytes=self.host.kv.stride(0),
            device_layer_bytes=device.kv.stride(0),
        )
