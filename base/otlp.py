"""Exports spans to a collector by OTLP, with OpenTelemetry's SDK. See `base.tracing`.

The SDK reads its environment variables: the sampler (OTEL_TRACES_SAMPLER), batches (OTEL_BSP_*), headers and
certificates of the exporter (OTEL_EXPORTER_OTLP_*), the name of the service. Ended spans wait in a queue of bounded
length for a thread of the SDK.
"""

import os
import threading
import time
from collections.abc import Mapping
from importlib import import_module

from base.errors import StartupError
from base.tracing import NO_SPAN, Attributes, Tracer, TraceSpan
from base.version import VERSION

try:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise StartupError(
        f"--otlp-traces-endpoint: {error}; install OpenTelemetry's SDK and exporters: pip install 'hisparse-pd[otlp]'"
    ) from error

_PREFIX = "hisparse_pd."
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_CLOSE_S = 2.0
"""How long a process that ends waits for its last spans to be exported: the collector may be gone."""
_CONTEXT = TraceContextTextMapPropagator()


class _RecordedSpan(TraceSpan):
    """A span of a traced request.

    epoch_ns: Unix time when time.monotonic was 0, the same for all spans under one, so that they meet exactly.
    """

    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, epoch_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns
        self._context = trace.set_span_in_context(span)
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, self._context)
        self.traceparent = carrier["traceparent"]

    def child(self, name: str, start: float | None = None) -> TraceSpan:
        span = self._tracer.start_span(name, self._context, start_time=_unix_ns(start, self._epoch_ns))
        return _RecordedSpan(self._tracer, span, self._epoch_ns)

    def note(self, attributes: Attributes) -> None:
        for name, value in attributes().items():
            if value is not None:
                self._span.set_attribute(name if "." in name else _PREFIX + name, value)

    def fail(self, reason: str | None) -> None:
        if reason is not None:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, reason))

    def end(self, at: float | None = None) -> None:
        self._span.end(_unix_ns(at, self._epoch_ns))

    def record(
        self, name: str, start: float, end: float | None = None, attributes: Attributes = dict, error: str | None = None
    ) -> None:
        child = self.child(name, start)
        child.note(attributes)
        child.fail(error)
        child.end(end)


class OtlpTracer(Tracer):
    """Exports by the protocol that OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names, by default HTTP with protobuf."""

    def __init__(self, endpoint: str, role: str, address: str) -> None:
        """See `base.tracing.tracer_to`."""
        if not endpoint.startswith(("http://", "https://")):
            raise StartupError(f"--otlp-traces-endpoint {endpoint}: expected a URL with http:// or https://")
        own = {"service.name": f"hisparse-pd-{role}", "service.version": VERSION, "service.instance.id": address}
        # The environment goes first: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("hisparse_pd", VERSION)

    def serve(self, name: str, headers: Mapping[str, str], start: float) -> TraceSpan:
        return self._begin(name, headers, trace.SpanKind.SERVER, start)

    def join(self, name: str, traceparent: str, start: float | None = None) -> TraceSpan:
        if not traceparent:
            return NO_SPAN
        return self._begin(name, {"traceparent": traceparent}, trace.SpanKind.INTERNAL, start)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _begin(self, name: str, headers: Mapping[str, str], kind: trace.SpanKind, start: float | None) -> TraceSpan:
        parent, epoch_ns = _CONTEXT.extract(headers), time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, parent, kind, start_time=_unix_ns(start, epoch_ns))
        return _RecordedSpan(self._tracer, span, epoch_ns) if span.is_recording() else NO_SPAN


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(_PROTOCOL, "http/protobuf")
    if protocol not in _EXPORTERS:
        raise StartupError(f"{_PROTOCOL}={protocol}: expected {' or '.join(_EXPORTERS)}")
    exporter: SpanExporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter(endpoint=endpoint)
    return exporter


def _unix_ns(at: float | None, epoch_ns: int) -> int:
    """Nanoseconds of Unix time at a time of time.monotonic, or now."""
    return epoch_ns + (time.monotonic_ns() if at is None else round(at * 1e9))
