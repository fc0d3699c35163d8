"""Spans that are exported to a collector, and those that nobody asked for."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from base.errors import StartupError
from base.tracing import NO_SPAN, NO_TRACER, Tracer, tracer_to
from tests.otlp import Collector, collecting

CLIENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def not_called() -> dict[str, str]:
    raise AssertionError("attributes of a request that is not traced")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def test_spans_of_two_processes_have_one_trace(collector: Collector) -> None:
    gateway, node = (tracer_to(collector.url, role, "10.0.0.1:80") for role in ("gateway", "decode"))
    now = time.monotonic()
    request = gateway.serve("POST /v1/completions", CLIENT, now - 2.0)
    request.record("route", now - 1.5, now - 0.5, lambda: {"candidates": ["a", "b"], "gen_ai.usage.x": 3, "no": None})
    there = node.join("llm_request", request.traceparent)
    queue = there.child("queue")
    queue.fail(None)
    queue.end()
    there.fail("out of memory")
    there.end()
    request.end(now)
    gateway.close()
    node.close()
    [root], [route], [inner], [last] = map(collector.named, ("POST /v1/completions", "route", "llm_request", "queue"))
    assert {span.trace_id for span in collector.spans} == {CLIENT["traceparent"].split("-")[1]}
    assert root.parent_id == CLIENT["traceparent"].split("-")[2]
    assert (route.parent_id, inner.parent_id, last.parent_id) == (root.span_id, root.span_id, inner.span_id)
    assert (root.service, inner.service) == ("hisparse-pd-gateway", "hisparse-pd-decode")
    assert (inner.error, last.error) == ("out of memory", None)
    assert route.attributes == {"hisparse_pd.candidates": ["a", "b"], "gen_ai.usage.x": 3}
    assert root.seconds == pytest.approx(2.0, abs=1e-3)
    assert route.start - root.start == pytest.approx(0.5, abs=1e-3)
    assert route.seconds == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("traced", [True, False])
def test_a_request_that_is_not_sampled_costs_nodes_nothing(collector: Collector, traced: bool) -> None:
    tracer = tracer_to(collector.url, "gateway", "") if traced else NO_TRACER
    span = tracer.serve("POST /v1/completions", {"traceparent": CLIENT["traceparent"][:-1] + "0"}, time.monotonic())
    assert span is NO_SPAN
    assert span.traceparent == ""
    assert tracer.join("llm_request", span.traceparent) is NO_SPAN
    span.note(not_called)
    span.record("route", 0.0, attributes=not_called)
    assert span.child("queue") is NO_SPAN
    tracer.close()
    assert collector.spans == []


def test_the_environment_names_the_sampler_and_the_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    tracer = tracer_to(collector.url, "gateway", "")
    spans = [tracer.serve("POST /v1/completions", {}, time.monotonic()) for _ in range(1000)]
    assert 50 < sum(span.is_recorded for span in spans) < 200
    assert tracer.serve("POST /v1/completions", CLIENT, time.monotonic()).is_recorded, "the client's choice counts"
    for span in spans:
        span.end()
    tracer.close()
    assert {span.service for span in collector.spans} == {"llm"}


def test_grpc_is_the_other_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))

    class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: object) -> object:  # noqa: N802
            collector.add(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracer = tracer_to(f"http://127.0.0.1:{port}", "prefill", "")
        tracer.join("attempt", CLIENT["traceparent"]).end()
        tracer.close()
    finally:
        server.stop(0)
    [span] = collector.spans
    assert (span.name, span.service) == ("attempt", "hisparse-pd-prefill")


def test_a_collector_that_is_gone_delays_no_request_and_no_end() -> None:
    tracer = tracer_to("http://127.0.0.1:9/v1/traces", "gateway", "")
    for _ in range(5000):
        tracer.serve("POST /v1/completions", {}, time.monotonic()).end()
    closing = time.monotonic()
    tracer.close()
    assert time.monotonic() - closing < 10


@pytest.mark.parametrize(
    ("endpoint", "environment", "missing", "said"),
    [
        ("collector:4317", {}, None, r"--otlp-traces-endpoint collector:4317: expected a URL"),
        ("http://x", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, None, "http/json: expected http/protobuf or"),
        ("http://x", {}, "opentelemetry.sdk.trace", r"pip install 'hisparse-pd\[otlp\]'"),
    ],
)
def test_what_cannot_be_exported_to_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, environment: dict[str, str], missing: str | None, said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if missing is not None:
        monkeypatch.delitem(sys.modules, "base.otlp", raising=False)
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StartupError, match=said):
        tracer_to(endpoint, "gateway", "")


def test_without_an_endpoint_nothing_of_opentelemetry_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "base.otlp", None)
    assert type(tracer_to(None, "gateway", "")) is Tracer
