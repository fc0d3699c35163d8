"""What is shown of both measurements: tables for people, JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.documents import write_document
from benchmarks.machine import this_machine
from benchmarks.percentiles import Percentiles
from benchmarks.prefix_cost.figures import FirstTokens, ProcessorTimes
from benchmarks.tables import table

SCHEMA = 1
TTFT_LIMIT = 0.2
"""What the time to first token of a prompt of which 95% are cached may be, of that of one that is not."""
PROCESSOR_LIMIT = 1.02
"""What the processor time of prompts that share nothing may be, of that without a cache."""


@dataclass(frozen=True)
class CostReport:
    """first_tokens: of the service with a cache and of the other one; empty, as processor is None, if not measured."""

    prompt_tokens: int
    shared_tokens: int
    first_tokens: Sequence[FirstTokens]
    processor: ProcessorTimes | None


def print_costs(report: CostReport, console: Console) -> None:
    """A line per service, and how far the figures are from what is asked for."""
    if report.first_tokens:
        console.print(
            f"time to first token, ms; {report.shared_tokens} of {report.prompt_tokens} tokens were seen before",
            _first_tokens(report.first_tokens),
            f"{report.first_tokens[0].label}: {report.first_tokens[0].ratio:.3f}, at most {TTFT_LIMIT} is asked for\n",
            sep="\n",
        )
    if (times := report.processor) is not None:
        spread = Percentiles.of(times.ratios)
        console.print(
            f"processor time, ms; {len(times.tokens)} prompts of {median(times.tokens):.0f} tokens in the median",
            _processor(times),
            f"{' / '.join(times.labels)}: {times.ratio:.4f} in the median of pairs, at most {PROCESSOR_LIMIT} is asked "
            f"for; {spread.p90:.4f} at the 90th percentile, {times.ratio_of_sums:.4f} of the sums\n",
            sep="\n",
        )
    console.print(str(this_machine()))


def _first_tokens(services: Sequence[FirstTokens]) -> Table:
    shown = table("service", "new", "again", "again / new", "cached tokens", words=("service",), folds=True)
    for service in services:
        known = [tokens for tokens in service.cached_tokens if tokens is not None]
        cached = f"{median(known):.0f}" if known else "-"
        times = (f"{1000 * median(seconds):.1f}" for seconds in (service.new, service.again))
        shown.add_row(service.label, *times, f"{service.ratio:.3f}", cached)
    return shown


def _processor(times: ProcessorTimes) -> Table:
    shown = table("service", "p50", "p90", "sum, s", words=("service",), folds=True)
    for label, seconds in zip(times.labels, (times.first, times.second), strict=True):
        spread = Percentiles.of(seconds)
        shown.add_row(label, f"{1000 * spread.p50:.1f}", f"{1000 * spread.p90:.1f}", f"{sum(seconds):.1f}")
    return shown


def write_json(path: Path, report: CostReport) -> None:
    """Every single figure, in seconds."""
    write_document(path, {"schema": SCHEMA, "benchmark": "prefix cost", **asdict(report)}, indent=None)
