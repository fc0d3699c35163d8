"""Every table shows its figures whole at 80 columns, also the widest that are to be expected, and they are right."""

import io
from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from rich.console import Console

from benchmarks import attention, top_k
from benchmarks.decode import report as decode
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.timing import StepTiming
from benchmarks.machine import this_machine
from benchmarks.percentiles import Percentiles
from benchmarks.prefill import report as prefill
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.timing import ChunkTiming, KernelTime
from benchmarks.prefix import report as prefix
from benchmarks.prefix.timing import OperationTime
from benchmarks.serving import report as serving
from benchmarks.serving.client import Failure, Outcome, Request
from benchmarks.serving.hits import PrefixHits
from benchmarks.serving.load import Open
from benchmarks.serving.measure import PointResult
from benchmarks.serving.metrics import Counts, Slo, Summary
from benchmarks.swap_in import report as swap_in
from benchmarks.swap_in.workload import Shape
from benchmarks.transfer import report as transfer
from benchmarks.transfer.cases import Case, Fragmentation, Protocol
from benchmarks.transfer.groups import Group
from benchmarks.transfer.methods import Run
from benchmarks.transfer.results import CaseResult, MethodResult
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


def transfer_table() -> Table:
    """Single tokens of 16 prompts over TCP take more than a minute."""
    methods = tuple(
        MethodResult(name, group, tuple(Run(seconds + n / 40, planning, descriptors) for n in range(1000)))
        for name, group, seconds, planning, descriptors in (
            ("ours", Group.OURS, 12.3451, 1.2345, 1_991_808),
            ("per token, synchronous", Group.TOKEN, 61.2341, 11.2346, 31_981_808),
            ("per page, synchronous", Group.PAGE, 14.1231, 3.3457, 499_712),
            ("1 MiB, synchronous", Group.CEILING, 13.2221, 0.0001, 35_136),
            ("memcpy, 16 threads", Group.CEILING, 10.0001, 0.0002, 35_137),
            ("NIXL over UCX", Group.NIXL, 63.3331, 0.0003, 7_808),
        )
    )
    case = Case(layers=61, source=Fragmentation.CONTIGUOUS, protocol=Protocol.SHM, concurrency=16)
    report = transfer.Report([CaseResult(case, methods)], [], {"initiator": this_machine()}, {}, others=None)
    times = " ".join(f"{1000 * value:.1f}" for method in methods for value in astuple(method.seconds))
    others = "1,991,808 31,981,808 499,712 35,136 35,137 7,808 1234.5 11234.6 3345.7 0.1 0.2 0.3 1.48 91% 107% 3.0 1000"
    return lambda console: transfer.print_report(report, console), f"{times} {others}"


def serving_table(*services: str) -> Table:
    """A request may take ten minutes."""
    times = [Percentiles(*(at + n for at in (410.0001, 510.0001, 600.0001))) for n in (0.001, 0.004)]
    gaps = [Percentiles(*(at + n for at in (10.0001, 110.0001, 510.0001))) for n in (0.002, 0.003)]
    counted = (36001.1, 100_002, {"HTTP 429": 10_003}, 2048.4, 1234.55, 1_234_567, 123_458, 1234.33)
    summary = Summary(*counted, ttft=times[0], itl=gaps[0], tpot=gaps[1], latency=times[1], counts=Counts(0, 0, 0, 0))
    refused = Outcome(Request(b"", 1, 1), 0.0, 1.0, failure=Failure("HTTP 429", "all queues are full"))
    points = [
        serving.PointReport(
            PointResult(service, Open(1024.25), [refused], 0.71, counted={"transfer_bytes_total": 1.2345678e12}),
            summary,
            PrefixHits(told=1000, cached=997, unknown=0, sent=1000, ideal=998),
        )
        for service in services
    ]
    report = serving.Report(points, Slo(ttft=1.0), {}, this_machine(), others=None)
    figures = "1024.25/s 100002 10003 36001.1 2048.4 0.71 1234.55 1234.33 1234567 123458 99.7 99.8 1234567.8"
    figures += " 410001.1 510001.1 600001.1 410004.1 510004.1 600004.1 410001 510001 600001"
    figures += " 10002.1 110002.1 510002.1 10003.1 110003.1 510003.1"
    return lambda console: serving.print_report(report, console), figures


def decode_table() -> Table:
    kernels = {"_score_pages": (134.51, 61.0), "_experts": (106.12, 116.0), "swap_in": (141.35, 61.0)}
    timing = StepTiming(450.88, 451.0, hit_rate=0.1311, misses=1779.0, num_bytes=18.3e9, kernels=kernels)
    work = {part: (Work(num_bytes=12.34 * HBM_BYTES_PER_MS),) for part in StepPart}
    results = [decode.CaseResult(256, 2048, 14 * GIB, timing, work, 55.4)]
    figures = "256 2048 450.88 86.38 5.22 568 238 1779 14.0 134.51/12.34 106.12/12.34 141.35/12.34 68.90/12.34"
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
    results = [attention.CaseResult("attend a chunk, 128 heads", 2048, (90_000_000_000, 70_000_000_000), us)]
    figures = "2048 1286669.1 23358.2 55.08 3853 13358.2 5240 25858.9 14358.2 9876.5"
    return lambda console: attention.print_results(results, 131072, 2707.0, console), figures


def top_k_table() -> Table:
    swept = {"1024x4": 11.5, "512x2": 12.0}
    results = [top_k.CaseResult(16, 64 << 10, 2.0, {"torch": 60.0, "ours": 10.0}, swept)]
    figures = "16 x 64K 2.0 60.0 10.0 6.0 20% 1024x4 11.5, 512x2 12.0"
    return lambda console: top_k.print_results(results, console), figures


def prefix_table() -> Table:
    times = [OperationTime("insert and release, all there", Percentiles(1000.0, 2000.0, 3000.0), 1.0)]
    return lambda console: prefix.print_times(times, console), "insert and release, all there"


@pytest.mark.parametrize(
    "table",
    [
        *(swap_in_table, transfer_table, decode_table, prefill_table, attention_table, top_k_table, prefix_table),
        lambda: serving_table("one"),
        lambda: serving_table('{"device_buffer_size": 4096}', '{"device_buffer_size": 8192}'),
    ],
)
def test_a_table_shows_all_its_figures(table: Callable[[], Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    show, figures = table()
    out = io.StringIO()
    show(Console(width=WIDTH, file=out))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert [figure for figure in figures.split() if figure not in text.split()] == []
