"""What `hisparse-pd bench serving` measures, by its configuration."""

from benchmarks.serving.config import ServingBench
from benchmarks.serving.load import Closed, Load, Open
from benchmarks.serving.measure import Point
from benchmarks.serving.metrics import Slo

_WARM_UP = 4


def points(config: ServingBench) -> list[Point]:
    """The loads, each with its requests."""
    return [Point(load, _warm_up(config, load), _requests(config, load)) for load in _loads(config)]


def slo(config: ServingBench) -> Slo:
    """What makes a request a good one."""
    ttft, itl = (None if ms is None else ms / 1e3 for ms in (config.slo_ttft_ms, config.slo_itl_ms))
    return Slo(ttft, itl)


def _loads(config: ServingBench) -> list[Load]:
    if config.request_rate:
        return [Open(rate, config.seed) for rate in config.request_rate]
    return [Closed(count) for count in config.concurrency or config.sizes.concurrency]


def _requests(config: ServingBench, load: Load) -> int:
    if config.num_requests is not None:
        return config.num_requests
    return max(config.sizes.requests, 4 * load.concurrency) if isinstance(load, Closed) else config.sizes.requests


def _warm_up(config: ServingBench, load: Load) -> int:
    if config.warmup_requests is not None:
        return config.warmup_requests
    return load.concurrency if isinstance(load, Closed) else _WARM_UP
