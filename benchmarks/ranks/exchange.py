"""The collectives around a mixture of experts, by rows: in replayed graphs on GPUs, one by one on CPUs."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.device import finish
from model.shard import Exchange
from ranks.group import RankGroup

ROWS = (1, 8, 32, 64, 256)
_PER_REPLAY = 20
_REPLAYS = 15


def time_exchange(group: RankGroup, exchange: Exchange, hidden_size: int) -> dict[int, tuple[float, float]]:
    """Microseconds of a gather and of a reduce, by rows of each rank. The slowest rank's, median over replays."""
    times: dict[int, tuple[float, float]] = {}
    for rows in ROWS:
        hidden = torch.randn(rows, hidden_size, device=group.device, dtype=torch.bfloat16)
        parts = torch.randn(rows * group.world_size, hidden_size, device=group.device, dtype=torch.bfloat16)
        pair = [_us(group, partial(exchange.gather, hidden)), _us(group, partial(exchange.reduce, parts))]
        gather, reduce = (max(each) for each in zip(*group.share(pair), strict=True))
        times[rows] = gather, reduce
    return times


def _us(group: RankGroup, call: Callable[[], object]) -> float:
    def several() -> None:
        for _ in range(_PER_REPLAY):
            call()

    several()
    run = several
    finish(group.device)
    if group.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            several()
        run = graph.replay
    times = []
    for _ in range(_REPLAYS):
        group.barrier.wait(1)
        started = time.perf_counter()
        run()
        finish(group.device)
        times.append((time.perf_counter() - started) / _PER_REPLAY * 1e6)
    return statistics.median(times)
