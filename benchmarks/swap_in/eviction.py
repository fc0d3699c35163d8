"""`python -m benchmarks.swap_in.eviction`: hit rates of the replacement policy, exact LRU and the optimum, on the CPU.

The optimum is Belady's ("A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966):
evict what is needed again latest. Traces are synthetic, or recorded from a model (`load_trace`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.program import run
from benchmarks.tables import table
from hisparse.config import MAX_DEVICE_BUFFER_SIZE
from hisparse.residency import Residency

Trace = npt.NDArray[np.int64]
"""[steps, k]: selected positions of each step, -1 for none. The newest position of step t is `first + t`."""

NEVER = 2**40
Policy = Callable[[Trace, int, int, int], float]
"""Hit rate of a trace, its first newest position, a number of hot slots, and the step to count from."""


@dataclass(frozen=True, kw_only=True)
class EvictionBench:
    """top_k positions are selected in each of `steps` steps, the first at `context_length` tokens.

    hot_ratios: hot buffer sizes, as multiples of top_k. traces: recorded ones, as `load_trace` reads them.
    """

    top_k: int = 256
    context_length: int = 4096
    steps: int = 1500
    hot_ratios: tuple[float, ...] = (1.25, 2.0, 4.0)
    seed: int = 0
    traces: tuple[Path, ...] = ()


@dataclass(frozen=True)
class EvictionResult:
    """Hit rates, in percent, of one trace with one hot buffer size. The newest position does not count."""

    trace: str
    hot_size: int
    clock: float
    lru: float
    optimum: float


def run_eviction_bench(config: EvictionBench, console: Console | None = None) -> list[EvictionResult]:
    """Play every trace against every policy, and print the table."""
    traces = {name: make(config) for name, make in SYNTHETIC.items()}
    lengths = dict.fromkeys(traces, config.context_length)
    for path in config.traces:
        name = f"{path.parent.name}/{path.stem}"
        traces[name], lengths[name] = load_trace(path)
    results = []
    sizes = {name: [hot_slots(ratio, trace.shape[1]) for ratio in config.hot_ratios] for name, trace in traces.items()}
    for name, trace in traces.items():
        for hot_size in sizes[name]:
            rates = [play(trace, lengths[name], hot_size) for play in (play_clock, play_lru, play_optimum)]
            results.append(EvictionResult(name, hot_size, *(100 * rate for rate in rates)))
    print_results(results, console or Console())
    return results


def hot_slots(ratio: float, top_k: int) -> int:
    """Of a buffer. Raises StartupError if it does not hold a step's positions, or is larger than buffers can be."""
    if not top_k <= ratio * top_k <= MAX_DEVICE_BUFFER_SIZE:
        raise StartupError(f"{ratio:g} times {top_k} hot slots: expected {top_k} to {MAX_DEVICE_BUFFER_SIZE}")
    return int(ratio * top_k)


def print_results(results: list[EvictionResult], console: Console) -> None:
    """A line per trace and size; says whether the policy is anywhere more than a point under LRU."""
    shown = table("trace", "hot slots", "clock %", "LRU %", "optimum %", "clock - LRU", words=("trace",))
    for result in results:
        rates = (f"{rate:.2f}" for rate in (result.clock, result.lru, result.optimum))
        shown.add_row(result.trace, str(result.hot_size), *rates, f"{result.clock - result.lru:+.2f}")
    console.print(shown)
    worst = min(results, key=lambda result: result.clock - result.lru)
    verdict = "never" if worst.clock - worst.lru >= -1 else "MORE THAN"
    console.print(
        f"{verdict} a point under LRU; at worst {worst.clock - worst.lru:+.2f} points "
        f"({worst.trace}, {worst.hot_size} hot slots)",
        highlight=False,
    )


def load_trace(path: Path) -> tuple[Trace, int]:
    """A recorded trace (.npz: `positions` int [steps, k], `first` the newest position of step 0), and `first`.

    Raises StartupError for any other file.
    """
    try:
        with np.load(path) as recorded:
            positions, first = recorded["positions"].astype(np.int64), int(recorded["first"])
        newest = first + np.arange(len(positions))[:, None]
        if positions.ndim != 2 or first < 0 or (positions > newest).any() or (positions < -1).any():
            raise ValueError(f"positions {positions.shape} are not those up to {first}, and one more in each step")
        if not ((positions >= 0) & (positions < newest)).any():
            raise ValueError("nothing is selected but the newest position")
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise StartupError(f"{path}: no recorded trace of benchmarks.swap_in.record: {error}") from error
    return positions, first


# Policies


def play_clock(trace: Trace, first: int, hot_size: int, since: int = 0) -> float:
    """Hit rate of the policy that this project has, from step `since` on."""
    residency = Residency(1, 1, first + len(trace), hot_size, torch.device("cpu"))
    residency.reset_empty(0)
    row, asked, missed = torch.tensor([0]), 0, 0
    for step, selected in enumerate(trace):
        newest = torch.tensor([first + step])
        plan = residency.resolve(0, row, torch.from_numpy(selected)[None, None], newest)
        if step >= since:
            missed += plan.misses
            asked += len(_older(selected, first + step))
    return 1 - missed / asked


def play_lru(trace: Trace, first: int, hot_size: int, since: int = 0) -> float:
    """Hit rate of exact LRU from step `since` on: evict what was selected longest ago, and of one step the lower ranked
    first."""
    k = trace.shape[1]
    return _play(trace, first, hot_size, lambda step, _, before: step * k - np.arange(len(before)), since)


def play_fifo(trace: Trace, first: int, hot_size: int, since: int = 0) -> float:
    """The same of FIFO: evict what came into the buffer first."""
    return _play(trace, first, hot_size, lambda step, is_hit, before: np.where(is_hit, before, step), since)


def play_optimum(trace: Trace, first: int, hot_size: int, since: int = 0) -> float:
    """The same of Belady's optimum: evict what is selected again latest."""
    next_use = np.full(first + len(trace), NEVER, dtype=np.int64)
    after: list[npt.NDArray[np.int64]] = []
    for step in range(len(trace) - 1, -1, -1):
        selected = _older(trace[step], first + step)
        after.append(next_use[selected])
        next_use[selected] = step
    after.reverse()
    return _play(trace, first, hot_size, lambda step, _, before: -after[step], since)


def _play(
    trace: Trace,
    first: int,
    hot_size: int,
    priorities: Callable[[int, npt.NDArray[np.bool_], npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    since: int,
) -> float:
    """Play a policy that evicts what has the lowest priority. `priorities` gives those of what a step selects, from the
    step, which of it are hits, and the priorities that it had."""
    resident = np.zeros(first + len(trace), dtype=bool)
    priority = np.zeros(first + len(trace), dtype=np.int64)
    asked = hits = 0
    for step in range(len(trace)):
        selected = _older(trace[step], first + step)
        is_hit = resident[selected]
        if step >= since:
            asked += len(selected)
            hits += int(is_hit.sum())
        resident[selected] = True
        held = np.flatnonzero(resident)
        surplus = len(held) - hot_size
        if surplus > 0:
            unprotected = np.setdiff1d(held, selected, assume_unique=True)
            resident[unprotected[np.argpartition(priority[unprotected], surplus - 1)[:surplus]]] = False
        priority[selected] = priorities(step, is_hit, priority[selected])
    return hits / asked


def _older(selected: npt.NDArray[np.int64], newest: int) -> npt.NDArray[np.int64]:
    """The distinct selected positions, in their order, that are not the newest."""
    positions = selected[(selected >= 0) & (selected != newest)]
    _, places = np.unique(positions, return_index=True)
    ordered: npt.NDArray[np.int64] = positions[np.sort(places)]
    return ordered


# Traces: the top-k of scores that change from step to step


def _top_k(scores: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.int64]:
    best = np.argpartition(-scores, k - 1)[:k]
    return best[np.argsort(-scores[best], kind="stable")]


def _trace(config: EvictionBench, scores: Callable[[int, np.random.Generator], npt.NDArray[np.float64]]) -> Trace:
    generator = np.random.default_rng(config.seed)
    return np.stack([_top_k(scores(step, generator), config.top_k) for step in range(config.steps)])


def drift(config: EvictionBench, pace: float = 0.1) -> Trace:
    """What matters changes slowly: each position's score is an autoregressive walk."""
    walk = np.random.default_rng(config.seed + 1).standard_normal(config.context_length + config.steps)

    def scores(step: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
        noise = generator.standard_normal(len(walk))
        walk[:] = np.sqrt(1 - pace**2) * walk + pace * noise
        return walk[: config.context_length + step + 1].copy()

    return _trace(config, scores)


def fast_drift(config: EvictionBench) -> Trace:
    """The same, three times as fast."""
    return drift(config, pace=0.3)


def recency(config: EvictionBench) -> Trace:
    """Recent positions matter most, the others now and then."""

    def scores(step: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
        length = config.context_length + step + 1
        age = np.arange(length)[::-1]
        return generator.gumbel(size=length) - 1.5 * np.log1p(age / config.top_k)

    return _trace(config, scores)


def periodic(config: EvictionBench) -> Trace:
    """A few subjects take turns, each with positions of its own that matter whenever it is back."""
    subjects, turn = 6, 40
    affinity = np.random.default_rng(config.seed + 2).standard_normal((subjects, config.context_length + config.steps))

    def scores(step: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
        length = config.context_length + step + 1
        return affinity[step // turn % subjects, :length] + 0.25 * generator.standard_normal(length)

    return _trace(config, scores)


def mixed(config: EvictionBench) -> Trace:
    """Drift, recency and subjects that come back, all at once, with a few positions that always matter."""
    size = config.context_length + config.steps
    walk = np.random.default_rng(config.seed + 3).standard_normal(size)
    affinity = np.random.default_rng(config.seed + 4).standard_normal((4, size))

    def scores(step: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
        length = config.context_length + step + 1
        walk[:] = 0.98 * walk + 0.2 * generator.standard_normal(size)
        age = np.arange(length)[::-1]
        sinks = 4.0 * (np.arange(length) < 8)
        recent = 2.0 * np.exp(-age / config.top_k)
        return walk[:length] + affinity[step // 60 % 4, :length] + recent + sinks

    return _trace(config, scores)


def scan(config: EvictionBench) -> Trace:
    """A reading head moves over the context again and again, beside a fixed part: the worst case for LRU and CLOCK."""
    half = config.top_k // 2

    def selected(step: int) -> npt.NDArray[np.int64]:
        head = half + (np.arange(half) + step * half // 4) % (config.context_length - half)
        return np.concatenate([np.arange(config.top_k - half), head])

    return np.stack([selected(step) for step in range(config.steps)])


SYNTHETIC: dict[str, Callable[[EvictionBench], Trace]] = {
    "drift": drift,
    "fast drift": fast_drift,
    "recency": recency,
    "periodic re-use": periodic,
    "mixed": mixed,
    "scan": scan,
}


def main(
    top_k: Annotated[int, typer.Option(min=2)] = EvictionBench.top_k,
    context_length: Annotated[
        int, typer.Option(min=1, help="Tokens at the first step.")
    ] = EvictionBench.context_length,
    steps: Annotated[int, typer.Option(min=1)] = EvictionBench.steps,
    traces: Annotated[list[Path] | None, typer.Option("--trace", help="A recorded trace, .npz.")] = None,
) -> None:
    """Play synthetic and recorded traces against every policy."""
    if context_length < top_k:
        raise StartupError(f"--context-length {context_length}: expected at least {top_k}, which is --top-k")
    run_eviction_bench(
        EvictionBench(top_k=top_k, context_length=context_length, steps=steps, traces=tuple(traces or ()))
    )


if __name__ == "__main__":
    run(main)
