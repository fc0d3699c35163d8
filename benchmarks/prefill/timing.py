"""Time of a chunk of a prompt, and the parts of it."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode.timing import part_of
from benchmarks.kernel_times import kernel_times
from benchmarks.prefill.workload import MARK
from model.roofline import StepPart

PARTS: tuple[StepPart, ...] = tuple(part for part in StepPart if part is not StepPart.SWAP_IN)
"""Those that a chunk has. The experts are the choice of experts and all that is computed of what ranks have gathered.
If experts are not in fp8, that is also the router's product, which else belongs to the projections. The rest is norms,
with or without quantisation, rotation, encoding, storing, copies, and the time from one kernel to the next."""


@dataclass(frozen=True)
class KernelTime:
    """What the kernels of one name take of a chunk, in milliseconds, and how many there are."""

    name: str
    part: StepPart
    ms: float
    count: int


@dataclass(frozen=True)
class ChunkTiming:
    """Of one chunk. passes_ms: each that was timed. peak_bytes: of device memory, weights included."""

    passes_ms: tuple[float, ...]
    peak_bytes: int
    kernels: tuple[KernelTime, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.passes_ms)

    @property
    def parts(self) -> dict[StepPart, float]:
        """Milliseconds of the kernels of each part; the rest: other kernels, and none."""
        parts = dict.fromkeys(PARTS, 0.0)
        for kernel in self.kernels:
            if kernel.part is not StepPart.REST:
                parts[kernel.part] += kernel.ms
        parts[StepPart.REST] = self.median_ms - sum(parts.values())
        return parts


def time_chunk(compute: Callable[[], None], passes: int) -> ChunkTiming:
    """Time passes, from the call until the device has computed all, one after another; then one under the profiler."""

    def pass_ms() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        compute()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    pass_ms()  # compiles
    torch.cuda.reset_peak_memory_stats()
    times = tuple(pass_ms() for _ in range(passes))
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        pass_ms()
    return ChunkTiming(times, peak, by_part(kernel_times(profiler)))


def by_part(kernels: Iterable[tuple[str, float]]) -> tuple[KernelTime, ...]:
    """Kernels and their milliseconds, in the order in which they ran: added up by name and part, the longest first.

    Between two marks all belongs to the experts: a quantisation or a product has the same name there and elsewhere.
    """
    total: dict[tuple[str, StepPart], float] = {}
    count: Counter[tuple[str, StepPart]] = Counter()
    within_experts = False
    for name, ms in kernels:
        if MARK in name:
            within_experts = not within_experts
            continue
        key = name, StepPart.EXPERTS if within_experts else part_of(name)
        total[key] = total.get(key, 0.0) + ms
        count[key] += 1
    longest = sorted(total.items(), key=lambda item: -item[1])
    return tuple(KernelTime(name, part, ms, count[name, part]) for (name, part), ms in longest)
