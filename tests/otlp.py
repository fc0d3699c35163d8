"""A collector of traces for tests: an HTTP server that takes OTLP and reads it by the published schema."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a collector has it. service: what exported it. start, end: seconds of Unix time."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any] = field(hash=False)
    error: str | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Collector:
    """Spans that were exported so far. url: of its endpoint."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self._spans: list[ReceivedSpan] = []

    def add(self, request: Any) -> None:
        """Take an ExportTraceServiceRequest."""
        for exported in request.resource_spans:
            service = _attributes(exported.resource.attributes)["service.name"]
            for span in (span for scope in exported.scope_spans for span in scope.spans):
                self._spans.append(
                    ReceivedSpan(
                        service=service,
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start=span.start_time_unix_nano / 1e9,
                        end=span.end_time_unix_nano / 1e9,
                        attributes=_attributes(span.attributes),
                        error=span.status.message if span.status.code else None,
                    )
                )

    def named(self, name: str, service: str = "") -> list[ReceivedSpan]:
        """Those of a name, in the order of their beginnings. service: the end of the service's name."""
        found = [span for span in self._spans if span.name == name and span.service.endswith(service)]
        return sorted(found, key=lambda span: span.start)

    @property
    def spans(self) -> list[ReceivedSpan]:
        return list(self._spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
