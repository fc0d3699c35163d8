"""Every table shows its figures whole at 80 columns, also the widest that are to be expected."""

from dataclasses import astuple

import pytest
import torch

from benchmarks import attention
from benchmarks.decode import report as decode
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.timing import StepTiming
from benchmarks.machine import this_machine
from benchmarks.percentiles import Percentiles
from benchmarks.prefill import report as prefill
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.timing import ChunkTiming, KernelTime
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
from tests.benchmarks.narrow import not_whole, printed


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_swap_in() -> None:
    case = swap_in.CaseResult(
        batch=128,
        misses=2048,
        num_bytes=302_000_000,
        cluster=16,
        swap_in=swap_in.Timing(graph_us=6126.9, single_us=6137.1),
        resolve=swap_in.Timing(graph_us=2009.9, single_us=2014.0),
        peer=swap_in.Timing(graph_us=16188.2, single_us=16199.4),
    )
    report = swap_in.Report([case], Shape(2048, 4096, 1152, 16384), 1024, "NVIDIA H200", 3.6, 55.4, "0.5.23.post1")
    text = printed(lambda console: swap_in.print_report(report, console))
    ours = ["128", "2048", "16", "6126.9", "6137.1", "2010.4", "5451.3", "49.3"]
    peers = ["6306", "1.03", "0.95", "16188.2", "16199.4", "2.64", "2.64"]
    assert not_whole(text, [*ours, *peers]) == []


def test_transfer() -> None:
    """Single tokens of 16 prompts over TCP take more than a minute."""

    def method(name: str, group: Group, seconds: float, planning: float, descriptors: int) -> MethodResult:
        return MethodResult(name, group, tuple(Run(seconds + n / 40, planning, descriptors) for n in range(1000)))

    case = Case(layers=61, source=Fragmentation.CONTIGUOUS, protocol=Protocol.SHM, concurrency=16)
    methods = (
        method("ours", Group.OURS, 12.3451, 1.2345, 1_991_808),
        method("per token, synchronous", Group.TOKEN, 61.2341, 11.2346, 31_981_808),
        method("per page, synchronous", Group.PAGE, 14.1231, 3.3457, 499_712),
        method("1 MiB, synchronous", Group.CEILING, 13.2221, 0.0001, 35_136),
        method("memcpy, 16 threads", Group.CEILING, 10.0001, 0.0002, 35_137),
        method("NIXL over UCX", Group.NIXL, 63.3331, 0.0003, 7_808),
    )
    report = transfer.Report([CaseResult(case, methods)], [], {"initiator": this_machine()}, {}, others=None)
    text = printed(lambda console: transfer.print_report(report, console))
    times = [f"{1000 * value:.1f}" for method in methods for value in astuple(method.seconds)]
    descriptors = ["1,991,808", "31,981,808", "499,712", "35,136", "35,137", "7,808"]
    planning = ["1234.5", "11234.6", "3345.7", "0.1", "0.2", "0.3"]
    assert not_whole(text, [*times, *descriptors, *planning, "1.48", "91%", "107%", "3.0", "1000"]) == []


@pytest.mark.parametrize("services", [("one",), ('{"device_buffer_size": 4096}', '{"device_buffer_size": 8192}')])
def test_serving(services: tuple[str, ...]) -> None:
    """A request may take ten minutes."""
    summary = Summary(
        seconds=36001.1,
        answered=100_002,
        failed={"HTTP 429": 10_003},
        in_flight=2048.4,
        requests_per_s=1234.55,
        input_tokens_per_s=1_234_567,
        output_tokens_per_s=123_458,
        goodput=1234.33,
        ttft=Percentiles(410.0011, 510.0011, 600.0011),
        itl=Percentiles(10.0021, 110.0021, 510.0021),
        tpot=Percentiles(10.0031, 110.0031, 510.0031),
        latency=Percentiles(410.0041, 510.0041, 600.0041),
        counts=Counts(0, 0, 0, 0),
    )
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
    text = printed(lambda console: serving.print_report(report, console))
    requests = ["1024.25/s", "100002", "10003", "36001.1", "2048.4", "0.71"]
    rates = ["1234.55", "1234.33", "1234567", "123458"]
    latencies = ["410001.1", "510001.1", "600001.1", "410004.1", "510004.1", "600004.1"]
    gaps = ["10002.1", "110002.1", "510002.1", "10003.1", "110003.1", "510003.1"]
    prefixes = ["99.7", "99.8", "410001", "510001", "600001", "1234567.8"]
    assert not_whole(text, [*requests, *rates, *latencies, *gaps, *prefixes]) == []


def test_decode() -> None:
    kernels = {"_score_pages": (134.51, 61.0), "_experts": (106.12, 116.0), "swap_in": (141.35, 61.0)}
    timing = StepTiming(
        median_ms=450.88, p90_ms=451.0, hit_rate=0.1311, misses=1779.0, num_bytes=18.3e9, kernels=kernels
    )
    work = {part: (Work(num_bytes=12.34 * HBM_BYTES_PER_MS),) for part in StepPart}
    results = [decode.CaseResult(256, 2048, 14 * 2**30, timing, work, 55.4)]
    text = printed(lambda console: decode.print_results(results, DecodeBench(rank_of=8), 103 * 2**30, console))
    steps = ["256", "2048", "450.88", "86.38", "5.22", "568", "238", "1779", "14.0"]
    parts = ["134.51/12.34", "106.12/12.34", "141.35/12.34", "68.90/12.34"]
    assert not_whole(text, [*steps, *parts]) == []


def test_prefill() -> None:
    kernels = (
        KernelTime("_experts", StepPart.EXPERTS, 1234.5, 928),
        KernelTime(
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<>>", StepPart.REST, 234.5, 610
        ),
        KernelTime("nvjet_sm90_tst_64x8", StepPart.PROJECTIONS, 345.6, 240),
    )
    timing = ChunkTiming((2345.6, 2345.7, 2345.8), 123 * 2**30, kernels)
    work = {part: (Work(num_bytes=123.4 * HBM_BYTES_PER_MS),) for part in StepPart}
    results = [prefill.CaseResult(context, 8192, timing, work) for context in (8192, 131072)]
    text = printed(lambda console: prefill.print_results(results, PrefillBench(rank_of=8), 103 * 2**30, console))
    chunks = ["131072", "2345.7", "740.4", "32%", "3492", "1778", "123.0"]
    parts = ["1234.5/123.4", "345.6/123.4", "765.6/123.4"]
    assert not_whole(text, [*chunks, *parts, "1234.5", "nvjet_sm90_tst_64x8"]) == []


def test_attention() -> None:
    us = {"torch": 1_286_669.1, "triton": 23358.2, "fp8": 13358.2, "plain": 14358.2, "extra": 9876.5}
    results = [attention.CaseResult("attend a chunk, 128 heads", 2048, (90_000_000_000, 70_000_000_000), us)]
    text = printed(lambda console: attention.print_results(results, 131072, 2707.0, console))
    cells = ["2048", "1286669.1", "23358.2", "55.08", "3853", "13358.2", "5240", "25858.9", "14358.2", "9876.5"]
    assert not_whole(text, cells) == []
