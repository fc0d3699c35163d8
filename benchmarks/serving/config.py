"""How `hisparse-pd bench serving` is configured."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from base.errors import StartupError
from base.flags import Flag
from benchmarks.documents import check_writable
from benchmarks.flags import parse_numbers, parse_rates, swept
from benchmarks.serving.answer import MOST_TOKEN_IDS
from decode_node.config import HiSparseJson

_TRACE_BLOCK_TOKENS = 512
"""As `benchmarks.prefix.trace` has it, whose import would make --help slow."""


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
    """The flags of the benchmark. None and empty ones are left to `Sizes`, or out."""

    base_urls: Annotated[
        tuple[str, ...],
        Flag(
            "http://HOST:PORT of an OpenAI-compatible service, or LABEL=URL; repeated to compare several. Default: a "
            "service is started here.",
            name="--base-url",
        ),
    ] = ()
    model: Annotated[str | None, Flag("Its model; default: the only one.")] = None
    api_key: Annotated[str | None, Flag("Key for --base-url.", env="OPENAI_API_KEY")] = field(default=None, repr=False)
    extra_body: Annotated[str | None, Flag("JSON object: further fields of each request.")] = None
    model_path: Annotated[Path | None, Flag("Checkpoint to serve here; default: a small trained one.")] = None
    hisparse_config: HiSparseJson = None
    compare_hisparse_config: Annotated[
        tuple[str, ...], Flag("Serve with this configuration too, one after the other; may be repeated.")
    ] = ()
    variants: Annotated[
        tuple[str, ...],
        Flag("Further flags of `serve`, or LABEL=FLAGS; may be repeated: one after the other.", name="--variant"),
    ] = ()
    serve_flags: Annotated[
        tuple[str, ...], Flag("After --: further flags of `hisparse-pd serve`.", positional=True)
    ] = ()
    input_tokens: Annotated[int | None, Flag("Tokens per prompt; default 1024.", min=1)] = None
    output_tokens: Annotated[int | None, Flag("Tokens per answer; default 128.", min=1)] = None
    range_ratio: Annotated[float, Flag("Both lengths are drawn from (1 - ratio) to (1 + ratio) times as many.")] = 0.0
    vocab_size: Annotated[
        int | None,
        Flag(
            "Token ids to draw from; default: the checkpoint's, 256 with --base-url, text for the default one.",
            min=1,
            max=MOST_TOKEN_IDS,
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Flag('JSONL file of prompts instead: {"prompt": ..., "output_tokens": ...}.'),
    ] = None
    turns: Annotated[
        int,
        Flag(
            "Turns of a conversation: each sends all that was said before, answers included, and --input-tokens more.",
            min=1,
        ),
    ] = 1
    shared_prefix: Annotated[int, Flag("Tokens that all prompts begin with, as a system prompt.", min=0)] = 0
    trace: Annotated[
        Path | None,
        Flag(
            "Replay this trace in Mooncake's format: prompts of made-up tokens, equal where its hash_ids are, at its "
            "timestamps, or by --concurrency or --request-rate instead."
        ),
    ] = None
    speed: Annotated[float, Flag("Of the trace: so many times as fast as it was recorded; inf: all at once.")] = 1.0
    limit: Annotated[int | None, Flag("Of the trace: only its first requests.", min=1)] = None
    block_tokens: Annotated[
        int,
        Flag(
            "Of the trace: tokens for each of its blocks of 512. All lengths become shorter by the same factor, so "
            "what is shared stays the same part. A multiple of 64.",
            min=64,
        ),
    ] = _TRACE_BLOCK_TOKENS
    max_input: Annotated[
        int | None,
        Flag(
            "Of the trace: requests with longer prompts, in tokens that are sent, are left out. Those that do not fit "
            "the checkpoint's context are anyway.",
            min=1,
        ),
    ] = None
    max_output: Annotated[int | None, Flag("Of the trace: answers end after so many tokens.", min=1)] = None
    seed: Annotated[int, Flag("Seed of prompts and arrivals.", min=0)] = 0
    concurrency: Annotated[
        tuple[int, ...], swept("Clients that wait for their answers; default 1,4,16.", parse_numbers)
    ] = ()
    request_rate: Annotated[
        tuple[float, ...], swept("Requests per second, at random times, instead; inf: all at once.", parse_rates)
    ] = ()
    num_requests: Annotated[
        int | None, Flag("Per load; default 64, and at least 4 per client; with --turns, conversations.", min=1)
    ] = None
    warmup_requests: Annotated[
        int | None, Flag("Ahead of each load, not counted; default: one per client, or 4.", min=0)
    ] = None
    request_timeout: Annotated[float, Flag("Seconds for a whole answer.", min=0.001)] = 600.0
    slo_ttft_ms: Annotated[float | None, Flag("Good requests have their first token by then.")] = None
    slo_itl_ms: Annotated[
        float | None, Flag("Good requests have 99% of their tokens within this of the one before.")
    ] = None
    quick: Annotated[bool, Flag("Small requests and few, in less than a minute.", name="--quick")] = False
    json: Annotated[Path, Flag("Where to write every figure.")] = Path("bench-serving.json")
    png: Annotated[Path, Flag("Where to draw tokens per second and gaps, or what was cached.")] = Path(
        "bench-serving.png"
    )

    def check(self) -> None:
        """Raises StartupError for options that contradict each other, before anything is started."""
        own = {
            "--model-path": self.model_path,
            "--hisparse-config": self.hisparse_config,
            "--compare-hisparse-config": self.compare_hisparse_config,
            "--variant": self.variants,
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
        if self.api_key and not self.api_key.isascii():
            raise StartupError("--api-key: expected ASCII, as headers of HTTP are")
        self._check_prompts()
        check_writable(self.json, self.png)

    def _check_prompts(self) -> None:
        """Raises StartupError for options of different prompts."""
        conversations = {"--turns": self.turns > 1, "--shared-prefix": self.shared_prefix}
        of_trace = {
            "--speed": self.speed != 1.0,
            "--limit": self.limit,
            "--block-tokens": self.block_tokens != _TRACE_BLOCK_TOKENS,
            "--max-input": self.max_input,
            "--max-output": self.max_output,
        }
        others = {
            "--prompts": self.prompts,
            "--input-tokens": self.input_tokens,
            "--output-tokens": self.output_tokens,
            "--range-ratio": self.range_ratio,
            "--num-requests": self.num_requests,
        }
        refused = {name for name, value in (conversations | others if self.trace else of_trace).items() if value}
        if refused:
            why = "a trace has its own requests" if self.trace else "for --trace, which is not given"
            raise StartupError(f"{', '.join(sorted(refused))}: {why}")
        if self.prompts and any(conversations.values()):
            raise StartupError("--prompts: with --turns and --shared-prefix, prompts are random")
        if self.trace and len(self.concurrency) + len(self.request_rate) > 1:
            raise StartupError("--trace: expected one load, since the next one would find all its prompts cached")
        if not self.speed > 0:
            raise StartupError(f"--speed {self.speed:g}: expected more than 0")

    @property
    def finds_prefixes(self) -> bool:
        """Whether prompts share beginnings, so that what a cache finds of them is to be reported."""
        return self.trace is not None or self.turns > 1 or self.shared_prefix > 0

    @property
    def sizes(self) -> Sizes:
        """What is asked for where the flags do not say."""
        return QUICK if self.quick else DEFAULT

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt, and of its answer."""
        return self.input_tokens or self.sizes.input_tokens, self.output_tokens or self.sizes.output_tokens

    @property
    def options(self) -> Mapping[str, object]:
        """What to write down of a run beside its load points: everything but the key."""
        left_out = ("api_key", "concurrency", "request_rate")
        written = {name: value for name, value in vars(self).items() if name not in left_out}
        if self.trace is None:
            written |= dict(zip(("input_tokens", "output_tokens"), self.lengths, strict=True))
        # JSON has neither paths nor infinity.
        return {
            name: str(value) if isinstance(value, Path) or value == math.inf else value
            for name, value in written.items()
        }

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
