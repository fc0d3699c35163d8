"""How much memory a node may plan with."""

from collections.abc import Iterator
from pathlib import Path

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
        free = available_host_bytes()
    return int(free * (fraction or DEFAULT_FRACTION[device.type]))


def available_host_bytes() -> int:
    """Bytes of main memory that can be had without swapping, nor being killed for it in a container."""
    available: int = psutil.virtual_memory().available
    return min([available, *cgroup_available()])


def cgroup_available(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes that are left under each limit that this process's control groups (version 2) have.

    File pages that were not used for long count as free: they are dropped before anything else happens.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if path is None:
        return
    group = root / path
    for directory in (group, *group.parents):
        if directory.is_relative_to(root) and (left := _left(directory)) is not None:
            yield left


def _left(directory: Path) -> int | None:
    """What is left under one group's limit; None if it has none."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((directory / "memory.current").read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
