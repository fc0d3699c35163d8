"""Spans of traced requests. The classes here do nothing, so that call sites need not ask; those of `base.otlp` export.

A request is traced if the gateway's sampler has chosen it. Messages about it carry the context of its span
(`traceparent` of W3C Trace Context), and nodes make spans of no other requests. Times are those of time.monotonic,
which most call sites have anyway.
"""

from collections.abc import Callable, Mapping, Sequence

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Callable[[], Mapping[str, AttributeValue | None]]
"""Called for traced requests only. A name without a dot gets the prefix `hisparse_pd.`; None is left out."""


class TraceSpan:
    """A part of what happens to a request: this one, to a request that is not traced.

    is_recorded: whether it is exported. traceparent: its context for messages, empty if it is not exported.
    """

    is_recorded = False
    traceparent = ""

    def child(self, name: str, start: float | None = None) -> "TraceSpan":
        """A part of it that has begun, now if no start is given."""
        return self

    def note(self, attributes: Attributes) -> None:
        """Add attributes. The span has not ended."""

    def fail(self, reason: str | None) -> None:
        """Mark it as failed, unless there is no reason. The span has not ended."""

    def end(self, at: float | None = None) -> None:
        """To be called once. Children may come later."""

    def record(
        self, name: str, start: float, end: float | None = None, attributes: Attributes = dict, error: str | None = None
    ) -> None:
        """Add a part that is over. Any thread may call it."""


NO_SPAN = TraceSpan()


class Tracer:
    """Begins the first span that a process makes of a request. This one traces nothing."""

    def serve(self, name: str, headers: Mapping[str, str], start: float) -> TraceSpan:
        """The span of a client's request, under the client's span if its headers name one."""
        return NO_SPAN

    def join(self, name: str, traceparent: str, start: float | None = None) -> TraceSpan:
        """A span under one of another process, whose message has that context. It begins now if no start is given."""
        return NO_SPAN

    def close(self) -> None:
        """Export what has ended."""


NO_TRACER = Tracer()


def tracer_to(endpoint: str | None, role: str, address: str) -> Tracer:
    """A tracer that exports to an OTLP endpoint; one that does nothing without an endpoint.

    role, address: of this process. Raises StartupError if the endpoint cannot be used.
    """
    if endpoint is None:
        return NO_TRACER
    from base.otlp import OtlpTracer  # OpenTelemetry is not always installed

    return OtlpTracer(endpoint, role, address)
