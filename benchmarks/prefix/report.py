"""What is shown of a simulation: tables for people, JSON for programs, and a figure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.documents import write_document
from benchmarks.machine import this_machine
from benchmarks.plotting import new_figure
from benchmarks.prefix.timing import PROMPT_TOKENS, OperationTime
from benchmarks.tables import table

SCHEMA = 1


@dataclass(frozen=True)
class PoolResult:
    """Tokens of the trace that were cached when they came, with a pool of so many slots.

    is_unlimited: the pool holds all that is distinct. lru, lru_from_the_end: as `policies.play_lru` has them.
    """

    slots: int
    is_unlimited: bool
    hits: int
    lru: int
    lru_from_the_end: int


@dataclass(frozen=True)
class TraceReport:
    """requests, tokens, distinct_tokens: of the trace; distinct in whole blocks. ideal: as PoolResult.hits, of an
    unlimited cache of another make."""

    trace: str
    requests: int
    tokens: int
    distinct_tokens: int
    ideal: int
    pools: Sequence[PoolResult]

    def problems(self) -> list[str]:
        """Where the cache is worse than it must be."""
        found = []
        for pool in self.pools:
            if pool.is_unlimited and pool.hits < 0.99 * self.ideal:
                found.append(f"unlimited: {pool.hits} tokens are hits, less than 99% of {self.ideal}")
            best = max(pool.lru, pool.lru_from_the_end)
            if pool.hits < best:
                found.append(f"{pool.slots} slots: {pool.hits} tokens are hits, {best} by LRU over blocks")
        return found


def print_trace(report: TraceReport, console: Console) -> None:
    """Hit rates, a line per pool, and a verdict."""
    console.print(
        f"{report.trace}: {report.requests} requests, {report.tokens} tokens, {report.distinct_tokens} distinct; "
        f"ideal: {_percent(report.ideal, report)}% of tokens are hits",
        highlight=False,
    )
    shown = table("slots", "of distinct %", "hits %", "LRU %", "LRU, ends first %")
    for pool in report.pools:
        shown.add_row(
            str(pool.slots),
            f"{100 * pool.slots / report.distinct_tokens:.1f}",
            *(_percent(hits, report) for hits in (pool.hits, pool.lru, pool.lru_from_the_end)),
        )
    console.print(shown)
    console.print(
        "Hits in percent of all tokens. LRU: over single blocks, beginnings of prompts first.",
        highlight=False,
    )
    for line in report.problems() or ["never worse than LRU over blocks"]:
        console.print(line, highlight=False)


def print_times(times: Sequence[OperationTime], console: Console) -> None:
    """A line per operation."""
    shown = table("ms", "p50", "p90", "limit", words=("ms",))
    for operation in times:
        limit = "" if operation.limit_ms is None else f"{operation.limit_ms:.0f}"
        shown.add_row(operation.name, f"{operation.ms.p50:.2f}", f"{operation.ms.p90:.2f}", limit)
    console.print(shown)
    console.print(f"Prompts of {PROMPT_TOKENS} tokens, 64 slots a block. {this_machine()}", highlight=False)


def write_json(path: Path, report: TraceReport | None, times: Sequence[OperationTime]) -> None:
    """Everything that was counted and measured."""
    content = {
        "schema": SCHEMA,
        "trace": None if report is None else asdict(report),
        "operations": [asdict(operation) for operation in times],
    }
    write_document(path, content)


def write_png(path: Path, report: TraceReport) -> None:
    """Hit rates against the size of the pool."""
    figure = new_figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    pools = sorted(report.pools, key=lambda pool: pool.slots)
    sizes = [100 * pool.slots / report.distinct_tokens for pool in pools]
    lines = {
        "block cache": ("o-", "tab:blue", [pool.hits for pool in pools]),
        "LRU over blocks, ends first": ("x--", "tab:orange", [pool.lru_from_the_end for pool in pools]),
        "LRU over blocks": ("s--", "tab:red", [pool.lru for pool in pools]),
    }
    for label, (style, colour, hits) in lines.items():
        axis.plot(sizes, [100 * count / report.tokens for count in hits], style, color=colour, label=label)
    axis.axhline(100 * report.ideal / report.tokens, linestyle=":", color="black", label="ideal")
    axis.set(xlabel="slots, % of distinct tokens", ylabel="hits, % of tokens", title=report.trace, ylim=(0, None))
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def _percent(tokens: int, report: TraceReport) -> str:
    return f"{100 * tokens / report.tokens:.2f}"
