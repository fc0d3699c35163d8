"""What a decode node's spans say of a request that fails, moves or gives way."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from base.tracing import Tracer, tracer_to
from control.messages import PrefillFailed, PrefillRequest
from tests.decode_node.world import HOT, PREFILL, World, counted
from tests.otlp import Collector, ReceivedSpan, collecting

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass
class Traced:
    """A tracer, and what it has exported once it is closed."""

    tracer: Tracer
    collector: Collector

    def of(self, request_id: str) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
        """The span of a request, and those in it in their order."""
        self.tracer.close()
        spans = sorted(self.collector.spans, key=lambda span: (span.start, span.end))
        [whole] = [span for span in spans if span.attributes.get("gen_ai.request.id") == request_id]
        return whole, [span for span in spans if span.parent_id == whole.span_id]


@pytest.fixture
def traced() -> Iterator[Traced]:
    with collecting() as collector:
        yield Traced(tracer_to(collector.url, "decode", "127.0.0.1:8020"), collector)


def test_each_attempt_is_a_span_and_nodes_get_its_context(traced: Traced) -> None:
    h = World(slow={"a"})
    h.scheduler._tracer = traced.tracer
    h.ask("a", prompt=(1, 2, 3), tokens=3, traceparent=PARENT)
    h.turn()
    [first] = [message for _, message in h.control.repeated.values() if isinstance(message, PrefillRequest)]
    h.remote.take(PREFILL, PrefillFailed(attempt=first.attempt, reason="out of memory"))
    h.scheduler.requests["a"].again_at = 0.0
    h.slow.clear()
    h.run()
    assert h.answers["a"] == counted((1, 2, 3), 3)
    whole, parts = traced.of("a")
    assert f"00-{whole.trace_id}-{whole.parent_id}-01" == PARENT
    assert [span.name for span in parts] == ["queue", "prefill", "queue", "prefill", "admission", "decode"]
    failed, landed = parts[1], parts[3]
    assert (failed.error, landed.error) == ("out of memory", None)
    assert first.traceparent == f"00-{whole.trace_id}-{failed.span_id}-01"
    assert [span.attributes["hisparse_pd.attempt"] for span in (failed, landed)] == [1, 2]
    assert all(abs(before.end - after.start) < 1e-5 for before, after in pairwise(parts))
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 3
    assert whole.attributes["gen_ai.latency.e2e"] == pytest.approx(whole.seconds, abs=1e-6)
    spent = ("in_queue", "in_model_prefill", "in_model_decode")
    assert 0 < sum(whole.attributes[f"gen_ai.latency.time_{one}"] for one in spent) <= whole.seconds + 1e-3


def test_a_request_that_is_retracted_has_a_span_for_that(traced: Traced) -> None:
    h = World(device_slots=HOT + 1 + 2)
    h.scheduler._tracer = traced.tracer
    for name, priority in (("later", 1), ("sooner", 0)):
        h.ask(name, prompt=(10,), tokens=30, priority=priority, traceparent=PARENT)
    h.run()
    whole, parts = traced.of("later")
    names = [span.name for span in parts]
    assert names[-3:] == ["decode", "retracted", "decode"]
    assert whole.attributes["hisparse_pd.retractions"] == names.count("retracted")
    last = parts[-1].attributes
    assert (last["hisparse_pd.tokens"], last["hisparse_pd.retractions"]) == (30, names.count("retracted"))
    assert last["hisparse_pd.node_hits"] + last["hisparse_pd.node_misses"] > 0


def test_an_error_and_a_lost_device_are_failed_spans(traced: Traced) -> None:
    h = World()
    h.scheduler._tracer = traced.tracer
    h.ask("a", traceparent=PARENT)
    h.ask("b", traceparent=PARENT)
    h.ask("untraced")
    h.turn()
    h.scheduler.end(h.scheduler.requests["a"], "error", "its tokens may be wrong")
    h.scheduler.end_streams("the device failed")
    failed, _ = traced.of("a")
    lost, _ = traced.of("b")
    assert (failed.error, failed.attributes["hisparse_pd.reason"]) == ("its tokens may be wrong", "error")
    assert (lost.error, lost.attributes["hisparse_pd.reason"]) == ("the device failed", "lost")
    assert {span.trace_id for span in traced.collector.spans} == {failed.trace_id}


def test_a_node_without_a_tracer_passes_the_context_on() -> None:
    h = World(slow={"a"})
    h.ask("a", traceparent=PARENT)
    h.turn()
    assert [one.traceparent for _, one in h.control.repeated.values() if isinstance(one, PrefillRequest)] == [PARENT]
