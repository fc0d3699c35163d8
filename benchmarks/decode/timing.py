"""Time of a decode step, and the parts of it."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import profile

from benchmarks.kernel_times import kernel_times
from model.roofline import StepPart

_NAMES: dict[StepPart, tuple[str, ...]] = {
    StepPart.EXPERTS: ("_experts", "_sort", "_swiglu_quantise", "_weigh", "_sum", "_choose", "grouped"),
    StepPart.INDEX: ("score_pages", "score_prompt", "_encode_index"),
    StepPart.TOP_K: ("top_k", "topk", "devicescan"),
    StepPart.SWAP_IN: ("swap_in",),
    StepPart.ATTENTION: ("_attend_split", "attend_items", "_combine"),
    StepPart.PROJECTIONS: (
        "_linear",
        "_partial_products",
        "_add_up",
        "_quantise",
        "nvjet",
        "gemm",
        "cutlass",
        "gemv",
    ),
}
"""What a kernel's name contains, in lower case, by the part of a step that it belongs to; the first that matches.

The rest is norms, rotation, encoding, storing and backing up new tokens, and the time from one kernel to the next.
torch's top-k scans by a kernel of CUB, which nothing else in a step does.
"""
_STREAMS = 24
_COLD_STEPS = 4
"""With published selections and 4,096 slots, the first steps of a request miss 2,047, 614, 506 and 427 of 2,048
positions in a layer."""

KernelTimes = dict[str, tuple[float, float]]
"""Milliseconds of each kernel in a step, and how many there are, by name; those that take longest first."""


def describe_filling(filling_ms: Sequence[float]) -> str:
    """What a report says of the steps in which rows became resident; empty if there are too few."""
    cold, others = filling_ms[:_COLD_STEPS], filling_ms[_COLD_STEPS:]
    if len(others) < 3:
        return ""
    last = statistics.quantiles(others, n=100, method="inclusive")[-1]
    return (
        f"the first steps, for which all requests have empty buffers, took {', '.join(f'{ms:.2f}' for ms in cold)} ms; "
        f"{len(others)} others in which rows became resident {statistics.median(others):.2f} ms, 99% of them at most "
        f"{last:.2f} ms"
    )


@dataclass(frozen=True)
class StepTiming:
    """Of one decode step. hits, misses: of each token and index layer. num_bytes: swapped in. ahead_bytes: of these,
    copied while earlier layers compute. ahead_wait_ms: how long the step waits for them.

    filling_ms: of each step while rows became resident, before the others. kernels: empty without a profile.
    """

    median_ms: float
    p90_ms: float
    hits: float
    misses: float
    num_bytes: float
    ahead_bytes: float = 0.0
    ahead_wait_ms: float = 0.0
    filling_ms: tuple[float, ...] = ()
    kernels: KernelTimes = field(default_factory=dict)

    @property
    def parts(self) -> dict[StepPart, float]:
        """Milliseconds of the kernels of each part; the rest: other kernels, and none."""
        parts = dict.fromkeys(StepPart, 0.0)
        for name, (ms, _) in self.kernels.items():
            if (part := part_of(name)) is not StepPart.REST:
                parts[part] += ms
        parts[StepPart.REST] = self.median_ms - sum(parts.values())
        return parts


def use_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Bring the process to where a serving one is, with as many streams in use. They count as long as they are kept.

    From about a dozen streams on, those that recorded steps have inside included, the device takes some 0.3 us longer
    from one kernel of a replay to the next (H200, driver 580): 0.6 ms in a step here. A node is there with its fourth
    recorded step, and what is compared must not be to either side of it.
    """
    streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    return streams


def part_of(kernel: str) -> StepPart:
    """The part of a step that a kernel of this name belongs to."""
    lowered = kernel.lower()
    return next((part for part, marks in _NAMES.items() if any(mark in lowered for mark in marks)), StepPart.REST)


def per_step(profiles: Sequence[profile]) -> KernelTimes:
    """The kernels of one step, of which there is a profile of each."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for profiled in profiles:
        for name, ms in kernel_times(profiled):
            times[name].append(ms)
    mean = {name: (sum(ms) / len(profiles), len(ms) / len(profiles)) for name, ms in times.items()}
    return dict(sorted(mean.items(), key=lambda item: -item[1][0]))
