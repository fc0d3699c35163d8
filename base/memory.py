"""How much memory a node may use for its pools, and which processors are near it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

DEFAULT_FRACTION = {"cpu": 0.1, "cuda": 0.8}
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pool_bytes(device: torch.device, fraction: float | None, to_load: int = 0) -> int:
    """Bytes for pools on the device: that fraction of what is free now, less `to_load` bytes of weights to come.

    By default 0.8 on CUDA, and 0.1 on a CPU, where the "device" pools share memory with the host pool.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()
    return int(max(0, free - to_load) * (fraction or DEFAULT_FRACTION[device.type]))


def device_split(device: torch.device, fraction: float | None) -> str | None:
    """A line that says what a CUDA device's memory is used for, once the weights are loaded; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    pools = pool_bytes(device, fraction)
    return (
        f"device memory: {human(total)}, of which {human(total - free)} taken by weights and whatever else was there, "
        f"{human(pools)} at most for pools (--mem-fraction-static), "
        f"{human(free - pools)} for activations, recorded steps"
    )


def available_host_bytes() -> int:
    """Bytes of main memory that are free without swapping and within the limit of a container."""
    available: int = psutil.virtual_memory().available
    return min([available, *cgroup_available()])


def cgroup_available(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes left under each limit of this process's control groups (version 2).

    Inactive file pages count as free: the kernel drops them first.
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


def cpus_near(device: torch.device) -> set[int] | None:
    """The processors near a CUDA device that this process may use. None on a CPU, or if the machine does not say."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's own types lack its PCI address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        near = parse_cpu_list((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return near & set(psutil.Process().cpu_affinity()) or None


def parse_cpu_list(text: str) -> set[int]:
    """The processors in a list such as "0-3,8,10-11". Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def human(num_bytes: float) -> str:
    """A number of bytes as text, such as "1.50 GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _left(directory: Path) -> int | None:
    """Bytes left under one group's limit; None if it has none."""
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((directory / "memory.current").read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
