"""What a prefill node's spans say of an attempt that fetches, is stopped or fails."""

from collections.abc import Iterator

import pytest

from base.tracing import Tracer, tracer_to
from control.messages import FetchDone, FetchRefused
from tests.otlp import Collector, ReceivedSpan, collecting
from tests.prefill_node.fetching import PREFIX, Fetching
from tests.prefill_node.world import World, live, request

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Tracer:
    return tracer_to(collector.url, "prefill", "127.0.0.1:8010")


@pytest.fixture
def fetching(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetching]:
    join = tracer.join
    monkeypatch.setattr(tracer, "join", lambda name, _: join(name, PARENT))
    for node in live(Fetching()):
        node.planner._tracer = tracer
        yield node


def closed(tracer: Tracer, collector: Collector) -> dict[str, ReceivedSpan]:
    """Spans by name, the last of each."""
    tracer.close()
    return {span.name: span for span in sorted(collector.spans, key=lambda span: span.start)}


def test_a_fetch_is_a_span(fetching: Fetching, tracer: Tracer, collector: Collector) -> None:
    attempt, asked = fetching.ask_fetching()
    fetching.answer(asked)
    fetching.until(FetchDone, attempt)
    fetching.finish(attempt, computed=72)
    spans = closed(tracer, collector)
    assert spans["fetch"].attributes == {"hisparse_pd.tokens": PREFIX}
    assert spans["fetch"].error is None
    assert spans["compute"].attributes["hisparse_pd.fetched"] == PREFIX
    assert spans["queue"].end <= spans["fetch"].start + 1e-3
    assert {spans[name].parent_id for name in ("queue", "fetch", "compute", "transfer")} == {spans["attempt"].span_id}


def test_a_fetch_that_is_refused_has_the_reason(fetching: Fetching, tracer: Tracer, collector: Collector) -> None:
    attempt, _ = fetching.ask_fetching()
    fetching.planner.fetch_answered(FetchRefused(attempt=attempt, reason="it is not here any more"))
    fetching.finish(attempt, computed=200)
    assert closed(tracer, collector)["fetch"].error == "it is not here any more"


def test_a_forward_pass_that_fails_is_told_with_its_attempt(tracer: Tracer, collector: Collector) -> None:
    node = World()
    node.planner._tracer = tracer
    node.receive(request(traceparent=PARENT))
    node.compute()
    node.sent()
    node.start()
    node.finish("out of memory")
    node.sent(error="aborted")
    spans = closed(tracer, collector)
    assert [span.error for span in collector.named("chunk")] == [None, "out of memory"]
    assert spans["attempt"].error == "out of memory"
    assert f"00-{spans['attempt'].trace_id}-{spans['attempt'].parent_id}-01" == PARENT
    assert "compute" not in spans
