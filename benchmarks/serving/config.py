"""What `hisparse-pd bench serving` is to measure, as its flags say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import StartupError
from benchmarks.serving.load import Closed, Load, Open
from benchmarks.serving.measure import Point
from benchmarks.serving.metrics import Slo

_WARM_UP = 4


@dataclass(frozen=True)
class Sizes:
    """What is asked for where the flags do not say. requests: per load point, and at least 4 of each client."""

    input_tokens: int = 1024
    output_tokens: int = 128
    concurrency: tuple[int, ...] = (1, 4, 16)
    requests: int = 64


DEFAULT = Sizes()
QUICK = Sizes(input_tokens=256, output_tokens=32, concurrency=(1, 4), requests=12)


@dataclass(frozen=True, kw_only=True)
class ServingBench:
    """Each field is the flag of the same name; None and empty ones are left to `Sizes`, or out.

    serve_flags: of `hisparse-pd serve`, where it is started. slo_*: milliseconds. request_timeout: seconds.
    """

    base_urls: tuple[str, ...] = ()
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_body: str | None = None
    model_path: Path | None = None
    hisparse_config: str | None = None
    compare_hisparse_config: tuple[str, ...] = ()
    serve_flags: tuple[str, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    range_ratio: float = 0.0
    vocab_size: int | None = None
    prompts: Path | None = None
    seed: int = 0
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_requests: int | None = None
    warmup_requests: int | None = None
    request_timeout: float = 600.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    quick: bool = False
    json: Path = Path("bench-serving.json")
    png: Path = Path("bench-serving.png")

    def check(self) -> None:
        """Raises StartupError for options that contradict each other, before anything is started."""
        own = {
            "--model-path": self.model_path,
            "--hisparse-config": self.hisparse_config,
            "--compare-hisparse-config": self.compare_hisparse_config,
            "flags of serve": self.serve_flags,
        }
        given = [name for name, value in own.items() if value]
        if self.base_urls and given:
            raise StartupError(f"{', '.join(given)}: for a service that is started here, not for one at --base-url")
        if self.model and not self.base_urls:
            raise StartupError("--model: the name of a model at --base-url; a checkpoint to serve is --model-path")
        if self.concurrency and self.request_rate:
            raise StartupError("--concurrency or --request-rate: clients that wait for answers, or that do not")
        if any(count < 1 for count in self.concurrency):
            raise StartupError(f"--concurrency {min(self.concurrency)}: expected at least 1")
        if not 0 <= self.range_ratio < 1:
            raise StartupError(f"--range-ratio {self.range_ratio}: expected 0 or more, and less than 1")

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else DEFAULT

    @property
    def loads(self) -> list[Load]:
        if self.request_rate:
            return [Open(rate, self.seed) for rate in self.request_rate]
        return [Closed(count) for count in self.concurrency or self.sizes.concurrency]

    @property
    def slo(self) -> Slo:
        ttft, itl = (None if ms is None else ms / 1e3 for ms in (self.slo_ttft_ms, self.slo_itl_ms))
        return Slo(ttft, itl)

    @property
    def points(self) -> list[Point]:
        return [Point(load, self._warm_up(load), self._requests(load)) for load in self.loads]

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt, and of its answer."""
        return self.input_tokens or self.sizes.input_tokens, self.output_tokens or self.sizes.output_tokens

    @property
    def options(self) -> Mapping[str, object]:
        """What to write down of a run beside its load points: everything but the key."""
        left_out = ("api_key", "concurrency", "request_rate")
        written = {name: value for name, value in vars(self).items() if name not in left_out}
        written |= dict(zip(("input_tokens", "output_tokens"), self.lengths, strict=True))
        return {name: str(value) if isinstance(value, Path) else value for name, value in written.items()}

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        """Of each request's body. Raises StartupError if they are no JSON object."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise StartupError(f"--extra-body {self.extra_body}: expected a JSON object")
        return fields

    def _requests(self, load: Load) -> int:
        if self.num_requests is not None:
            return self.num_requests
        return max(self.sizes.requests, 4 * load.concurrency) if isinstance(load, Closed) else self.sizes.requests

    def _warm_up(self, load: Load) -> int:
        if self.warmup_requests is not None:
            return self.warmup_requests
        return load.concurrency if isinstance(load, Closed) else _WARM_UP
