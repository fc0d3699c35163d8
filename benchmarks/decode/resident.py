"""The reference of `bench decode --resident`: all KV in HBM, and nothing in the step that looks for it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from base.errors import StartupError
from base.memory import cpus_near
from hisparse.coordinator import HiSparseCoordinator
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.slabs import SlabLayout
from hisparse.swap_in import CpuSwapIn, StepBatch, SwapInPlan
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout


class SlotsAsSelected(CpuSwapIn):
    """Takes what is selected for slots: a step resolves and fetches nothing. On the CPU and on CUDA devices.

    Counts no hits. New tokens are copied to the host as by the other backends.
    """

    def resolve(self, index_layer: int, batch: StepBatch, positions: torch.Tensor) -> SwapInPlan:
        nothing = positions.new_empty(0)
        return SwapInPlan(positions, nothing, nothing)

    def fetch(self, plan: SwapInPlan, layer: int) -> None:
        """Everything is there."""

    def drain(self) -> None:
        if self.device.kv.is_cuda:
            torch.cuda.synchronize(self.device.device)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, from_slots: torch.Tensor, to_slots: torch.Tensor
    ) -> None:
        if not self.device.kv.is_cuda:
            super()._copy(source, target, from_slots, to_slots)
            return
        from kernels.copy_items import copy_items  # needs what compiles kernels

        copy_items(source, target, from_slots, to_slots)


def resident_tiers(
    layout: KVLayout,
    *,
    batch: int,
    context_length: int,
    num_host_slots: int,
    index_page_size: int,
    window: int,
    device: torch.device,
    pool_bytes: int | None = None,
) -> HiSparseCoordinator:
    """Tiers for `batch` requests whose positions are all at the hot index of their number, at any context length.

    What a step selects must be given as device slots. Raises StartupError if that takes more than `pool_bytes`.
    """
    size = context_length + window
    slab = SlabLayout.of(layout, index_page_size, size)
    num_slabs = batch * (slab.for_slots(context_length) + slab.for_pages(context_length))
    if pool_bytes is not None and num_slabs * slab.num_bytes > pool_bytes:
        raise StartupError(
            f"all KV of {batch} requests takes {num_slabs * slab.num_bytes} bytes, more than {pool_bytes}"
        )
    pool = DeviceKVPool(
        layout,
        num_slabs=num_slabs,
        index_page_size=index_page_size,
        max_requests=batch,
        max_context=context_length,
        device_buffer_size=size,
        device=device,
        window=window,
    )
    host = HostKVPool(layout, num_host_slots, device.type == "cuda", cpus=cpus_near(device))
    nothing = Residency(layout.num_index_layers, batch, 1, 1, device)
    return HiSparseCoordinator(SlotsAsSelected(host, pool, nothing), ThreadPoolExecutor(1), resident_rows=False)
