"""Puts the KV tiers of a decode node together: the one place that knows which backend a device has."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from base.errors import StartupError
from base.memory import cpus_near
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.sizing import Sizes, step_window
from hisparse.staging import CopyStream, CudaCopyStream
from hisparse.swap_in import CpuSwapIn, SwapInBackend
from kernels.swap_in import largest_hot_size
from kvcache.host_pool import HostKVPool


def build_tiers(
    sizes: Sizes, device: torch.device, verify: bool = False, shareable: bool = False
) -> HiSparseCoordinator:
    """The coordinator of a node that decodes on `device`, with pools of these sizes; `shareable`: see HostKVPool.

    A CUDA device must be the current one of the thread that calls this and uses the coordinator. Raises StartupError if
    the device has no backend here, or cannot have these pools.
    """
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"there is no swap-in backend for {device}, only for cpu and cuda")
    layout, config = sizes.layout, sizes.config
    hot_size = config.device_buffer_size
    # A CUDA device reads and writes the host pool by itself, for which the pool must be pinned.
    pin = device.type == "cuda"
    with ExitStack() as on_failure:
        host = HostKVPool(layout, sizes.num_host_slots, pin, shareable, cpus_near(device), sizes.has_prefix_cache)
        # Memory that is freed while pinned would pass for pinned memory at its next owner.
        on_failure.callback(host.close)
        pool = DeviceKVPool(
            layout,
            num_slabs=sizes.num_slabs,
            index_page_size=sizes.index_page_size,
            max_requests=sizes.max_requests,
            max_context=sizes.max_context,
            device_buffer_size=hot_size,
            device=device,
            window=sizes.window,
            max_hot_slabs=sizes.max_hot_slabs,
        )
        residency = Residency(
            layout.num_index_layers, sizes.max_requests, sizes.max_context, hot_size, device, sizes.window
        )
        backend, copy_stream = _make_backend(host, pool, residency, config)
        on_failure.pop_all()
    return HiSparseCoordinator(backend, copy_stream, verify, config.resident_rows)


def largest_buffer(config: HiSparseConfig, max_context: int, max_drafts: int, device: torch.device) -> int:
    """How large `plan_sizes` may make hot buffers on a device: what its swap-in kernel has shared memory for.

    0 on the CPU, whose memory is not for the tiers alone. Raises StartupError if the device has no backend here.
    """
    if device.type == "cpu":
        return 0
    try:
        from kernels.launch import shared_memory_limit
    except ImportError as error:
        raise _missing(device, error) from error
    available, window = shared_memory_limit(device), step_window(max_drafts)
    return largest_hot_size(config.top_k, 1 + max_drafts, window, max_context, config.swap_in_block_size, available)


def _make_backend(
    host: HostKVPool, pool: DeviceKVPool, residency: Residency, config: HiSparseConfig
) -> tuple[SwapInBackend, CopyStream]:
    if pool.device.type == "cpu":
        return CpuSwapIn(host, pool, residency), ThreadPoolExecutor(1, "hisparse-copy")
    try:
        # Here, since a machine without an accelerator need not have what compiles kernels.
        from hisparse.cuda_swap_in import CudaSwapIn
    except ImportError as error:
        raise _missing(pool.device, error) from error
    backend = CudaSwapIn(host, pool, residency, config.top_k, config.swap_in_block_size)
    return backend, CudaCopyStream(pool.device)


def _missing(device: torch.device, error: ImportError) -> StartupError:
    return StartupError(f"decoding on {device} needs {error.name}: install hisparse-pd[kernels]")
