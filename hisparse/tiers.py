"""Putting the KV tiers of a decode node together."""

import torch

from hisparse.coordinator import HiSparseCoordinator
from hisparse.copy_stream import CpuCopyStream
from hisparse.device_pool import DeviceKVPool
from hisparse.host_pool import HostKVPool
from hisparse.residency import Residency
from hisparse.sizing import Sizes
from hisparse.swap_in import CpuSwapIn


def build_cpu_tiers(sizes: Sizes, verify: bool = False, shareable: bool = False) -> HiSparseCoordinator:
    """The coordinator of a node without an accelerator, with pools of these sizes; `shareable`: see HostKVPool."""
    cpu = torch.device("cpu")
    layout, hot_size = sizes.layout, sizes.config.device_buffer_size
    host = HostKVPool(layout, sizes.num_host_slots, pin=False, shareable=shareable)
    device = DeviceKVPool(
        layout,
        num_slots=sizes.num_device_slots,
        num_index_pages=sizes.num_index_pages,
        index_page_size=sizes.index_page_size,
        max_requests=sizes.max_requests,
        max_context=sizes.max_context,
        device_buffer_size=hot_size,
        device=cpu,
    )
    residency = Residency(layout.num_index_layers, sizes.max_requests, sizes.max_context, hot_size, cpu)
    backend = CpuSwapIn(host, device, residency)
    return HiSparseCoordinator(host, device, residency, backend, CpuCopyStream(), verify)
