"""Tables of a step or a chunk, on narrow terminals."""

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.parts_report import print_columns, table

PARTS = ("projections", "top-k")


def made(results: Sequence[int]) -> Table:
    parts = table("parts, ms / limit", "part", *(f"64 x {result}" for result in results))
    for part in PARTS:
        parts.add_row(part, *(f"{result}.32/{result}.44" for result in results))
    return parts


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_no_number_is_cut(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns)
    results = list(range(10, 22))
    print_columns(console, results, made)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    expected = [f"{result}.32/{result}.44" for result in results for _ in PARTS]
    assert sorted(re.findall(r"[\d.]+/[\d.]+", printed)) == expected
    assert max(map(len, printed.splitlines())) <= columns
    assert "…" not in printed
