"""`python -m benchmarks.fetch`: fetching a prefix from another process against computing it, on CPUs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.documents import check_writable, write_document
from benchmarks.fetch.measure import Case, Links, Node, Pass, run_link, tiny_model
from benchmarks.flags import parse_numbers
from benchmarks.machine import this_machine
from benchmarks.program import run
from benchmarks.tables import table

_RATES = (8.0, 2.0, 1.4, 0.7)
"""Throttled links, in multiples of the rate at which fetching the median length takes as long as computing it."""


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of prefixes, separated by commas.")] = "4K,8K,16K,32K",
    layers: Annotated[int, typer.Option(min=2, help="The last one computes no attention.")] = 2,
    chunk: Annotated[int, typer.Option("--chunked-prefill-size", min=64)] = 2048,
    fetch_rate: Annotated[
        str, typer.Option(help="Throttled links over TCP, bytes a second; by default around where the two ways cross.")
    ] = "",
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-fetch.json"),
) -> None:
    """Compute the longest prefix once, fetch all of them over plain and throttled links, and compare."""
    check_writable(json_path)
    console = Console()
    tokens = sorted(parse_numbers("--lengths", [lengths]))
    limits = parse_numbers("--fetch-rate", [fetch_rate]) if fetch_rate else ()
    if any(rate <= 0 for rate in limits):
        raise StartupError(f"--fetch-rate {fetch_rate}: expected numbers above 0")
    if any(length <= 0 or length % chunk for length in tokens):
        raise StartupError(f"--lengths {lengths}: expected multiples of --chunked-prefill-size {chunk}")
    with tiny_model(layers, tokens[-1] + chunk) as model:
        node = Node(model, tokens[-1] + chunk, chunk)
        node.compute(chunk, lambda _: None)
        passes = node.compute(tokens[-1], lambda done: _say_pass(console, done))
        median = tokens[(len(tokens) - 1) // 2]
        crossing = median * node.pool.layout.token_bytes / sum(p.seconds for p in passes if p.stop <= median)
        cases: list[Case] = []
        throttled = limits or [rate * crossing for rate in _RATES]
        for protocol, rates in (("shm", [0.0]), ("tcp", [0.0, *throttled])):
            links = Links(node, protocol, tokens[-1])  # type: ignore[arg-type]
            for rate in rates:
                cases += run_link(links, node, passes, tokens, rate, lambda case: _say(console, case))
            links.close()
    _print(console, cases, node.pool.layout.token_bytes)
    content = {
        "passes": [asdict(each) for each in passes],
        "cases": [asdict(case) | {"fetches": case.fetches, "is_right": case.is_right} for case in cases],
    }
    write_document(json_path, content)


def _say_pass(console: Console, done: Pass) -> None:
    console.print(f"computed up to {done.stop}: {done.seconds:.2f} s", highlight=False)


def _say(console: Console, case: Case) -> None:
    fetching = "cut" if case.fetching is None else f"{case.fetching:.3f} s"
    console.print(f"{case.transport} {case.rate / 1e6:.2f} MB/s, {case.tokens} tokens: {fetching}", highlight=False)


def _print(console: Console, cases: list[Case], token_bytes: int) -> None:
    shown = table("link", "MB/s", "tokens", "compute", "fetch", "+ pass", "ahead", "estimates", "chosen")
    for case in sorted(cases, key=lambda case: (case.transport, -(case.rate or 1e18), case.tokens)):
        shown.add_row(
            case.transport,
            f"{case.rate / 1e6:.2f}" if case.rate else "plain",
            str(case.tokens),
            f"{case.computing:.2f}",
            "longer" if case.fetching is None else f"{case.fetching:.3f}",
            "" if case.after is None else f"{case.after:.3f}",
            "" if case.meanwhile is None else f"{case.meanwhile:.3f}",
            f"{case.estimated_computing:.2f} / {case.estimated_fetching:.2f}",
            ("fetch" if case.fetches else "compute") + ("" if case.is_right else "!"),
        )
    console.print(shown)
    right = sum(case.is_right for case in cases)
    console.print(
        f"Seconds. The choice is the faster way in {right} of {len(cases)} (others: !). {token_bytes} bytes a token. "
        f"+ pass: until the next chunk is computed, too, if its pass begins after the fetch; ahead: if it begins while "
        f"layers come. estimates: of computing and of fetching, before. {this_machine()}",
        highlight=False,
    )


if __name__ == "__main__":
    run(main)
