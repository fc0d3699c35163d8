"""How long ranks take to agree on a step, beside an all-reduce, and how long to wake one that sleeps."""

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranks.group import RankGroup

_ROUNDS = 300
_WARM_UP = 20
_WAKES = 30
_MOST_SKEW_S = 1e-3


@dataclass(frozen=True)
class AgreementTimes:
    """Microseconds from the last rank's arrival to the last one's departure, one for each round.

    shared_memory: as nodes agree. gloo: an all-reduce of eight integers. waking: from the call of one rank until all
    agreed, where the others sleep.
    """

    shared_memory: list[float]
    gloo: list[float]
    waking: list[float]


def time_agreement(group: RankGroup, woken: threading.Event) -> AgreementTimes:
    """All ranks of the group call it. woken: set when the group has this rank take its next turn."""
    over_gloo = dist.new_group(backend="gloo")
    numbers = torch.zeros(8, dtype=torch.int64)
    return AgreementTimes(
        shared_memory=_from_last_to_last(group, lambda: group.barrier.wait(1)),
        gloo=_from_last_to_last(group, lambda: dist.all_reduce(numbers, group=over_gloo)),
        waking=_waking(group, woken),
    )


def summary(times: list[float]) -> str:
    """Median and 90th percentile in microseconds."""
    return f"{statistics.median(times):.1f} / {statistics.quantiles(times, n=10)[-1]:.1f}"


def _from_last_to_last(group: RankGroup, meet: Callable[[], object]) -> list[float]:
    rng = random.Random(group.rank)
    arrivals, departures = [], []
    for _ in range(_WARM_UP + _ROUNDS):
        until = time.monotonic() + rng.random() * _MOST_SKEW_S
        while time.monotonic() < until:
            pass
        arrivals.append(time.monotonic_ns())
        meet()
        departures.append(time.monotonic_ns())
    # One clock for all processes of a machine.
    everybody = group.share([arrivals[_WARM_UP:], departures[_WARM_UP:]])
    last_arrivals = map(max, zip(*(arrived for arrived, _ in everybody), strict=True))
    last_departures = map(max, zip(*(departed for _, departed in everybody), strict=True))
    return [(left - came) / 1e3 for came, left in zip(last_arrivals, last_departures, strict=True)]


def _waking(group: RankGroup, woken: threading.Event) -> list[float]:
    times = []
    for _ in range(_WAKES):
        if group.rank == 0:
            time.sleep(0.15)  # until the others sleep
            started = time.monotonic()
            group.barrier.wait(1)
            times.append((time.monotonic() - started) * 1e6)
            continue
        woken.clear()
        while not group.barrier.wait(0):
            if not group.barrier.spin_before_sleep(lambda: False):
                woken.wait(5)
                woken.clear()
    return group.share(times)[0]  # type: ignore[no-any-return]
