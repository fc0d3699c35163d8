"""What each GPU of a group reads from its own pinned host memory: by itself, and while all the others read theirs."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from benchmarks.swap_in.launchers import Ours
from benchmarks.swap_in.timing import check_misses, recorded
from benchmarks.swap_in.workload import Rotation, Shape, Tiers
from hisparse.cuda_swap_in import CudaSwapIn
from ranks.group import RankGroup

_SHAPE = Shape(top_k=2048, hot_size=4096, item_bytes=656, context=32768)
_BATCH, _MISSES = 64, 512
_SECONDS = 1.0


@dataclass(frozen=True)
class HostReadRates:
    """GB/s of one rank, by swap-in and by the copy engine.

    alone: while no other rank reads. together: while all do.
    """

    swap_in_alone: float
    swap_in_together: float
    copy_alone: float
    copy_together: float


def time_host_reads(group: RankGroup) -> list[HostReadRates]:
    """All ranks call it, each with a GPU. Each rank's pool lies near its GPU, as those of decode nodes do."""
    with closing(Tiers(_SHAPE, _BATCH)) as tiers:
        swap_in = CudaSwapIn(tiers.host, tiers.device, tiers.residency, _SHAPE.top_k)
        rotation = Rotation(_SHAPE, _BATCH, _MISSES, seed=group.rank)
        launcher = Ours(tiers, swap_in, rotation)
        swap_in_rates = _rates(group, recorded(launcher), rotation.length * rotation.num_bytes)
        check_misses(launcher, 0)
        host = tiers.host.kv
        device = torch.empty(host.shape, dtype=host.dtype, device=group.device)
        copy_rates = _rates(group, lambda: device.copy_(host, non_blocking=True), host.nbytes)
    return [HostReadRates(*rates) for rates in group.share([*swap_in_rates, *copy_rates])]


def _rates(group: RankGroup, read: Callable[[], object], num_bytes: int) -> tuple[float, float]:
    """GB/s of this rank alone, and with all others. read: queues a read of num_bytes."""
    alone = 0.0
    for rank in range(group.world_size):
        group.share(None)
        if rank == group.rank:
            alone = _gb_per_s(read, num_bytes)
    group.share(None)
    return alone, _gb_per_s(read, num_bytes)


def _gb_per_s(read: Callable[[], object], num_bytes: int) -> float:
    """Over a second, so that it does not matter that ranks do not begin and end in the same millisecond."""
    reads, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < _SECONDS:
        read()
        torch.cuda.synchronize()
        reads += 1
    return reads * num_bytes / took / 1e9
