"""Putting the KV tiers of a decode node together: the one place that knows which backend a device has."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from base.errors import StartupError
from base.memory import cpus_near
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.copy_stream import CopyStream, CpuCopyStream
from hisparse.device_pool import DeviceKVPool
from hisparse.host_pool import HostKVPool
from hisparse.residency import Residency
from hisparse.sizing import Sizes
from hisparse.swap_in import CpuSwapIn, SwapInBackend

_Backend = Callable[[HostKVPool, DeviceKVPool, Residency, HiSparseConfig], tuple[SwapInBackend, CopyStream]]


def build_tiers(
    sizes: Sizes, device: torch.device, verify: bool = False, shareable: bool = False
) -> HiSparseCoordinator:
    """The coordinator of a node that decodes on `device`, with pools of these sizes; `shareable`: see HostKVPool.

    A CUDA device must be the current one of the thread that calls this and uses the coordinator. Raises StartupError if
    the device has no backend here, or cannot have these pools.
    """
    make_backend = _backend_of(device)
    layout, config = sizes.layout, sizes.config
    hot_size = config.device_buffer_size
    # A device with memory of its own reads and writes the host pool by itself, which takes pinned memory.
    pin = device.type != "cpu"
    with ExitStack() as on_failure:
        host = HostKVPool(layout, sizes.num_host_slots, pin, shareable, cpus=cpus_near(device))
        # Memory that goes while it is pinned would be taken for pinned memory by whoever gets its addresses next.
        on_failure.callback(host.close)
        pool = DeviceKVPool(
            layout,
            num_slots=sizes.num_device_slots,
            num_index_pages=sizes.num_index_pages,
            index_page_size=sizes.index_page_size,
            max_requests=sizes.max_requests,
            max_context=sizes.max_context,
            device_buffer_size=hot_size,
            device=device,
        )
        residency = Residency(layout.num_index_layers, sizes.max_requests, sizes.max_context, hot_size, device)
        backend, copy_stream = make_backend(host, pool, residency, config)
        on_failure.pop_all()
    return HiSparseCoordinator(host, pool, residency, backend, copy_stream, verify)


def _backend_of(device: torch.device) -> _Backend:
    backends: dict[str, _Backend] = {"cpu": _cpu_backend, "cuda": _cuda_backend}
    if device.type not in backends:
        raise StartupError(f"there is no swap-in backend for {device}, only for {' and '.join(backends)}")
    return backends[device.type]


def _cpu_backend(
    host: HostKVPool, pool: DeviceKVPool, residency: Residency, config: HiSparseConfig
) -> tuple[SwapInBackend, CopyStream]:
    return CpuSwapIn(host, pool, residency), CpuCopyStream()


def _cuda_backend(
    host: HostKVPool, pool: DeviceKVPool, residency: Residency, config: HiSparseConfig
) -> tuple[SwapInBackend, CopyStream]:
    try:
        # Here, since a machine without an accelerator need not have what compiles kernels.
        from hisparse.cuda import CudaCopyStream, CudaSwapIn
    except ImportError as error:
        raise StartupError(f"decoding on {pool.device} needs {error.name}: install hisparse-pd[kernels]") from error
    backend = CudaSwapIn(host, pool, residency, config.top_k, config.swap_in_block_size)
    return backend, CudaCopyStream(pool.device)
