"""Microseconds of launches on a GPU, in replays of a graph that holds some turns of them."""

import statistics
from collections.abc import Callable

import torch

_REPLAYS = 9

Work = Callable[[int], object]
"""Launches turn number i of something."""


def median_us(work: Work, turns: int) -> float:
    """Microseconds of one turn: the median of replays of a graph of all turns, or of single calls if there are none."""
    work(0)
    torch.cuda.synchronize()
    if turns == 0:
        return statistics.median(elapsed_us(lambda: work(0)) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            work(turn)
    graph.replay()
    return statistics.median(elapsed_us(graph.replay) for _ in range(_REPLAYS)) / turns


def copy_gb_per_s() -> float:
    """Bytes read and written per second by a kernel that copies 1 GiB: what to measure reading against.

    It negates, since a recorded `copy_` may be left to a copy engine, which is slower (2.8 of 4.2 TB/s on an H200).
    """
    source = torch.randn(1 << 28)
    target = torch.empty_like(source)
    us = median_us(lambda _: torch.neg(source, out=target), 2)
    return 2 * source.nbytes / us / 1e3


def elapsed_us(work: Callable[[], object]) -> float:
    """Microseconds between an event before and an event after the work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
