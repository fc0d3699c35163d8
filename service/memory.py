"""How much memory a node may plan with."""

import psutil
import torch

DEFAULT_FRACTION = {"cpu": 0.1, "cuda": 0.8}


def pool_bytes(device: torch.device, fraction: float | None) -> int:
    """Bytes for pools on the device: that fraction of what is free now (default 0.1 on CPU, 0.8 on CUDA).

    On a CPU the "device" pools share the machine's memory with the host pool, hence the smaller default.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(free * (fraction or DEFAULT_FRACTION[device.type]))


def available_host_bytes() -> int:
    """Bytes of main memory that can be had without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
