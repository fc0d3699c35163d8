"""Time of a decode step, and the parts of it."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode.workload import Requests
from benchmarks.kernel_times import kernel_times
from benchmarks.stepping import GREEDY, launch
from engine.runner import ModelRunner
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
PROFILED_STEPS = 5
_STREAMS = 24


@dataclass(frozen=True)
class StepTiming:
    """Of one decode step. hits, misses: of each token and index layer. num_bytes: swapped in.

    kernels: milliseconds of each, and how many there are, by name. filling_ms: of each step while rows became resident,
    before the others.
    """

    median_ms: float
    p90_ms: float
    hits: float
    misses: float
    num_bytes: float
    kernels: dict[str, tuple[float, float]]
    filling_ms: tuple[float, ...] = ()

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


def time_steps(
    requests: Requests,
    runner: ModelRunner,
    vocab: int,
    before: Callable[[int], None],
    warm_up: int,
    steps: int,
) -> StepTiming:
    """Time steps of all requests, from the call until the device has the logits, one after another. Nothing is sampled.

    A node that drafts verifies as many drafts as it makes, and all are right. Accepting fewer takes as long.
    `before(n)` prepares step n, outside the time taken, as is making room for the tokens. Kernels are timed in further
    steps, which run under the profiler.
    """
    rng = random.Random(0)
    passes, width = runner.passes, runner.policy.max_width
    rows = [requests.coordinator.row(request_id) for request_id in requests.ids]

    def step_ms(number: int, watched: AbstractContextManager[object]) -> float:
        requests.make_room()
        before(number)
        for request_id in requests.ids:
            runner.admit(request_id, [rng.randrange(vocab)], [], GREEDY)
        passes.num_drafts.fill_(width - 1)
        right = passes.tokens[rows, :width].roll(-1, dims=1).flatten()  # after the drafts, any token
        torch.cuda.synchronize()
        requests.coordinator.fill_rows()
        with watched:
            start = time.perf_counter()
            step = launch(runner, requests.coordinator, requests.ids, width=width)
            if width > 1:
                passes.accept(len(requests.ids), width, right)
                step.drawn = right[:, None].double()
                runner.draft(step)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        requests.coordinator.step_over(step.batch.places, dict.fromkeys(requests.ids, width))
        return elapsed * 1e3

    filling, idle = list[float](), 0 if requests.coordinator.residents.enabled else 2
    while idle < 2:  # a fill ends in one step, and the next one begins in the step after
        filling.append(step_ms(len(filling), nullcontext()))
        idle = idle + 1 if requests.are_filled else 0
    begin = len(filling) + warm_up
    for number in range(len(filling), begin):
        step_ms(number, nullcontext())
    first = requests.coordinator.counters()
    times = [step_ms(begin + number, nullcontext()) for number in range(steps)]
    last = requests.coordinator.counters()
    profiles = [profile(activities=[ProfilerActivity.CUDA]) for _ in range(PROFILED_STEPS)]
    for number, profiler in enumerate(profiles):
        step_ms(begin + steps + number, profiler)
    looked_up = steps * len(requests.ids) * width * requests.coordinator.host.layout.num_index_layers
    return StepTiming(
        median_ms=statistics.median(times),
        p90_ms=statistics.quantiles(times, n=10)[-1],
        hits=(last.hits - first.hits) / looked_up,
        misses=(last.misses - first.misses) / looked_up,
        num_bytes=(last.bytes - first.bytes) / steps,
        kernels=_kernel_ms(profiles),
        filling_ms=tuple(filling),
    )


def _kernel_ms(profiles: Sequence[profile]) -> dict[str, tuple[float, float]]:
    """Milliseconds and number of each kernel in one step, of which there is a profile of each."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for profiled in profiles:
        for name, ms in kernel_times(profiled):
            times[name].append(ms)
    per_step = {name: (sum(ms) / len(profiles), len(ms) / len(profiles)) for name, ms in times.items()}
    return dict(sorted(per_step.items(), key=lambda item: -item[1][0]))
