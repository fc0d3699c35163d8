"""Tables of `benchmarks.attention`."""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.tables import table


@dataclass(frozen=True)
class CaseResult:
    """Median microseconds in each column."""

    name: str
    batch: int
    num_bytes: tuple[int, int]
    us: dict[str, float]
    tensor_us: float = 0.0


def print_results(results: list[CaseResult], shapes: str, bandwidth: float, console: Console) -> None:
    """A line per case and format, and what the columns mean. shapes: of cases. bandwidth: GB/s, of the limits."""
    dense = _table("bfloat16", "torch us", "triton us", "ratio", "GB/s")
    fp8 = _table("fp8", "torch", "us", "GB/s", "limit", "plain", "extra")
    for result in results:
        dense_bytes, fp8_bytes = result.num_bytes
        torch_us, triton_us, fp8_us = (result.us.get(name) for name in ("torch", "triton", "fp8"))
        if triton_us:
            ratio = None if torch_us is None else torch_us / triton_us
            cells = (_number(torch_us), _number(triton_us), _number(ratio, 2))
            dense.add_row(result.name, str(result.batch), *cells, _number(dense_bytes / triton_us / 1e3, 0))
        if fp8_us:
            in_torch = _number(None if triton_us else torch_us)  # beside triton_us it stands for bfloat16
            cells = (in_torch, _number(fp8_us), _number(fp8_bytes / fp8_us / 1e3, 0))
            limit = _number(max(fp8_bytes / bandwidth / 1e3, result.tensor_us))
            others = (_number(result.us.get(name)) for name in ("plain", "extra"))
            fp8.add_row(result.name, str(result.batch), *cells, limit, *others)
    console.print(dense, "")
    console.print(fp8, "")
    console.print(
        f"Microseconds. torch and triton: bfloat16; {shapes}. GB/s counts the items or keys once, whatever was read "
        f"again; the limit is the larger of fp8's bytes at {bandwidth:.0f} GB/s, what a copy reached in this run, and "
        "its products at 800 TFLOP/s, or 1600 of fp8 numbers; plain: by Triton alone, without kernels for Hopper; "
        "extra: FlashMLA or DeepGEMM. "
        f"{torch.cuda.get_device_name()}",
        highlight=False,
    )


def _table(title: str, *headings: str) -> Table:
    return table("", "queries", *headings, title=title, words=("",), collapse_padding=True)


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
