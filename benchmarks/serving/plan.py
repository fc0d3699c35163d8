"""What `hisparse-pd bench serving` measures, by its configuration."""

from benchmarks.serving.config import ServingBench
from benchmarks.serving.load import Closed, Load, Open, Scheduled
from benchmarks.serving.measure import Point
from benchmarks.serving.metrics import Slo

_WARM_UP = 4


def points(config: ServingBench, schedule: Scheduled | None = None) -> list[Point]:
    """The loads, each with its requests. schedule: the times of a trace, whose requests are sent."""
    if schedule is not None and not (config.request_rate or config.concurrency):
        loads: list[Load] = [schedule]
    else:
        loads = _loads(config)
    return [_point(config, load, schedule) for load in loads]


def slo(config: ServingBench) -> Slo:
    """What makes a request a good one."""
    ttft, itl = (None if ms is None else ms / 1e3 for ms in (config.slo_ttft_ms, config.slo_itl_ms))
    return Slo(ttft, itl)


def _point(config: ServingBench, load: Load, schedule: Scheduled | None) -> Point:
    requests = _requests(config, load) if schedule is None else len(schedule.times)
    return Point(load, _warm_up(config, load), requests, config.turns)


def _loads(config: ServingBench) -> list[Load]:
    if config.request_rate:
        return [Open(rate, config.seed) for rate in config.request_rate]
    return [Closed(count) for count in config.concurrency or config.sizes.concurrency]


def _requests(config: ServingBench, load: Load) -> int:
    if config.num_requests is not None:
        return config.num_requests
    if config.turns > 1:
        return max(config.sizes.requests // config.turns, load.concurrency if isinstance(load, Closed) else 1)
    return max(config.sizes.requests, 4 * load.concurrency) if isinstance(load, Closed) else config.sizes.requests


def _warm_up(config: ServingBench, load: Load) -> int:
    if config.warmup_requests is not None:
        return config.warmup_requests
    return load.concurrency if isinstance(load, Closed) else _WARM_UP
