"""`python -m benchmarks.prefix`: hit rates of the prefix cache on a trace, and what its operations take, on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError
from benchmarks.documents import check_writable
from benchmarks.flags import parse_numbers
from benchmarks.plotting import check_installed
from benchmarks.prefix.policies import distinct_blocks, play_cache, play_ideal, play_lru
from benchmarks.prefix.report import PoolResult, TraceReport, print_times, print_trace, write_json, write_png
from benchmarks.prefix.timing import measure_operations
from benchmarks.prefix.trace import TracedPrompt, load_trace
from benchmarks.program import run

UNLIMITED = "unlimited"


def simulate(name: str, prompts: Sequence[TracedPrompt], sizes: Sequence[str]) -> TraceReport:
    """Play a trace with pools of these sizes: slots, percents of the distinct tokens such as 5%, or unlimited.

    Raises StartupError for a size that is none of these or holds no block.
    """
    distinct = distinct_blocks(prompts)
    capacities = [_blocks(size, distinct) for size in sizes]
    pools = [_play(prompts, capacity, is_unlimited=capacity == distinct) for capacity in capacities]
    tokens = sum(prompt.input_length for prompt in prompts)
    return TraceReport(name, len(prompts), tokens, distinct * BLOCK_TOKENS, play_ideal(prompts), pools)


def _play(prompts: Sequence[TracedPrompt], capacity: int, is_unlimited: bool) -> PoolResult:
    return PoolResult(
        slots=capacity * BLOCK_TOKENS,
        is_unlimited=is_unlimited,
        hits=play_cache(prompts, capacity),
        lru=play_lru(prompts, capacity, from_the_end=False),
        lru_from_the_end=play_lru(prompts, capacity, from_the_end=True),
    )


def _blocks(size: str, distinct: int) -> int:
    """More than is distinct is the same as unlimited."""
    if size == UNLIMITED:
        return distinct
    try:
        blocks = int(float(size[:-1]) / 100 * distinct) if size.endswith("%") else None
    except (ValueError, OverflowError) as error:
        raise StartupError(f"--slots {size}: expected slots such as 512K, a percentage or {UNLIMITED}") from error
    if blocks is None:
        blocks = parse_numbers("--slots", [size])[0] // BLOCK_TOKENS
    if blocks < 1:
        raise StartupError(f"--slots {size}: less than a block of {BLOCK_TOKENS}")
    return min(blocks, distinct)


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="In Mooncake's format.")] = None,
    slots: Annotated[
        str,
        typer.Option(help="Pool sizes, separated by commas: slots such as 512K, 5% of distinct tokens, unlimited."),
    ] = f"{UNLIMITED},20%,10%,5%",
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-prefix.json"),
    png_path: Annotated[Path, typer.Option("--png", help="The figure, of a trace.")] = Path("bench-prefix.png"),
) -> None:
    """Play a trace against the prefix cache, and time its operations."""
    check_writable(json_path, png_path)
    console = Console()
    report = None
    if trace is not None:
        check_installed()
        report = simulate(trace.stem, load_trace(trace), [size.strip() for size in slots.split(",")])
        print_trace(report, console)
        write_png(png_path, report)
    times = measure_operations()
    print_times(times, console)
    write_json(json_path, report, times)


if __name__ == "__main__":
    run(main)
