"""Tables of benchmarks that need a GPU show their figures whole at 80 columns, also the widest, and they are right."""

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from benchmarks import attention_report, top_k
from benchmarks.decode import report as decode
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.timing import StepTiming
from benchmarks.prefill import report as prefill
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.timing import ChunkTiming, KernelTime
from benchmarks.swap_in import report as swap_in
from benchmarks.swap_in.workload import Shape
from model.roofline import HBM_BYTES_PER_MS, StepPart, Work

WIDTH = 80
GIB = 2**30
Table = tuple[Callable[[Console], None], str]
"""What prints it, and all figures that it has to show, in words."""


def swap_in_table() -> Table:
    timings = [swap_in.Timing(*us) for us in ((6126.9, 6137.1), (2009.9, 2014.0), (16188.2, 16199.4))]
    case = swap_in.CaseResult(128, 2048, 302_000_000, 16, *timings)
    report = swap_in.Report([case], Shape(2048, 4096, 1152, 16384), 1024, "NVIDIA H200", 3.6, 55.4, "0.5.23.post1")
    figures = "128 2048 16 6126.9 6137.1 2010.4 5451.3 49.3 6306 1.03 0.95 16188.2 16199.4 2.64 2.64"
    return lambda console: swap_in.print_report(report, console), figures


def decode_table() -> Table:
    kernels = {"_score_pages": (134.51, 61.0), "_experts": (106.12, 116.0), "swap_in": (141.35, 61.0)}
    timing = StepTiming(450.88, 451.0, hits=269.0, misses=1779.0, num_bytes=18.3e9, kernels=kernels)
    work = {part: (Work(num_bytes=12.34 * HBM_BYTES_PER_MS),) for part in StepPart}
    results = [decode.CaseResult(256, "published", 14 * GIB, 16384, 256, timing, work, 55.4)] * 12
    figures = (
        "256 published 450.88 86.38 5.22 568 238 1779 16384 256 134.51/12.34 106.12/12.34 141.35/12.34 68.90/12.34"
    )
    return lambda console: decode.print_results(results, DecodeBench(rank_of=8), 103 * GIB, console), figures


def prefill_table() -> Table:
    long = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<>>"
    kernels = (
        KernelTime("_experts", StepPart.EXPERTS, 1234.5, 928),
        KernelTime(long, StepPart.REST, 234.5, 610),
        KernelTime("nvjet_sm90_tst_64x8", StepPart.PROJECTIONS, 345.6, 240),
    )
    work = {part: (Work(num_bytes=123.4 * HBM_BYTES_PER_MS),) for part in StepPart}
    timing = ChunkTiming((2345.6, 2345.7, 2345.8), 123 * GIB, kernels)
    results = [prefill.CaseResult(context, 8192, timing, work) for context in (8192, 131072)]
    figures = "131072 2345.7 740.4 32% 3492 1778 123.0 1234.5/123.4 345.6/123.4 765.6/123.4 1234.5 nvjet_sm90_tst_64x8"
    return lambda console: prefill.print_results(results, PrefillBench(rank_of=8), 103 * GIB, console), figures


def attention_table() -> Table:
    us = {"torch": 1_286_669.1, "triton": 23358.2, "fp8": 13358.2, "plain": 14358.2, "extra": 9876.5}
    results = [attention_report.CaseResult("attend a chunk, 128 heads", 2048, (90_000_000_000, 70_000_000_000), us)]
    figures = "2048 1286669.1 23358.2 55.08 3853 13358.2 5240 25858.9 14358.2 9876.5"
    return lambda console: attention_report.print_results(results, "items of 576", 2707.0, console), figures


def top_k_table() -> Table:
    swept = {"1024x4": 11.5, "512x2": 12.0}
    results = [top_k.CaseResult(16, 64 << 10, 2.0, {"torch": 60.0, "ours": 10.0}, swept)]
    figures = "16 x 64K 2.0 60.0 10.0 6.0 20% 1024x4 11.5, 512x2 12.0"
    return lambda console: top_k.print_results(results, console), figures


@pytest.mark.parametrize("table", [swap_in_table, decode_table, prefill_table, attention_table, top_k_table])
def test_a_table_shows_all_its_figures(table: Callable[[], Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    show, figures = table()
    out = io.StringIO()
    show(Console(width=WIDTH, file=out))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert [figure for figure in figures.split() if figure not in text.split()] == []
