"""What a gateway's spans say of a request, and what it tells nodes of its trace."""

from collections.abc import Callable, Iterator

import pytest

from control.messages import Output
from tests.gateway.nodes import wait_until
from tests.gateway.world import MODEL, World
from tests.otlp import Collector, collecting

PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as collector:
        yield collector


@pytest.fixture
def traced(start_world: Callable[..., World], collector: Collector) -> World:
    return start_world(otlp_traces_endpoint=collector.url)


def test_the_span_of_a_request_says_what_was_asked_and_answered(traced: World, collector: Collector) -> None:
    traced.decode.cached_tokens = (2,)
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2}
    answer = traced.http.post("/v1/completions", json=body, headers=PARENT).json()
    wait_until(lambda: collector.named("POST /v1/completions"))
    [root] = collector.named("POST /v1/completions")
    assert PARENT["traceparent"] == f"00-{root.trace_id}-{root.parent_id}-01"
    said = {name.removeprefix("gen_ai."): value for name, value in root.attributes.items()}
    assert said.pop("latency.e2e") >= said.pop("latency.time_to_first_token") > 0
    assert said.pop("hisparse_pd.http_request_id").startswith("req_")
    assert said == {
        "request.id": answer["id"],
        "request.model": MODEL,
        "request.max_tokens": 4,
        "request.n": 2,
        "request.temperature": 0.5,
        "request.top_p": 0.9,
        "response.model": MODEL,
        "usage.prompt_tokens": answer["usage"]["prompt_tokens"],
        "usage.completion_tokens": answer["usage"]["completion_tokens"],
        "usage.num_sequences": 2,
        "http.response.status_code": 200,
        "hisparse_pd.cached_tokens": 2,
        "hisparse_pd.migrations": 0,
        "hisparse_pd.reason": "length",
    }
    assert {generate.traceparent for generate in traced.decode.generated} == {f"00-{root.trace_id}-{root.span_id}-01"}


def test_routing_is_told_with_all_candidates(traced: World, collector: Collector) -> None:
    other = traced.start_full_decode()
    traced.post(max_tokens=2)
    wait_until(lambda: collector.named("wait"))
    [route], [wait] = collector.named("route"), collector.named("wait")
    chosen, full = traced.decode.control.me.address, other.control.me.address
    assert route.attributes["hisparse_pd.node"] == chosen
    assert f"{full} cached=0 load=1000000" in route.attributes["hisparse_pd.candidates"]
    assert len(route.attributes["hisparse_pd.candidates"]) == 2
    [prefill] = wait.attributes["hisparse_pd.candidates"]
    assert prefill.startswith(f"{traced.prefill.control.me.address} cached=0")


def test_a_migration_is_a_span_with_its_reason(traced: World, collector: Collector) -> None:
    traced.decode.chunks = [[97], [98]]
    traced.decode.extra_outputs = [Output(request_id="-", start=2, finish_reason="lost", error="scripted")]
    other = traced.start_full_decode()
    other.chunks = [[letter] for letter in b"abcd"]
    assert traced.post(max_tokens=4).status_code == 200
    wait_until(lambda: collector.named("POST /v1/completions"))
    [migrate], [first, second] = collector.named("migrate"), collector.named("stream")
    assert migrate.attributes["hisparse_pd.from"] == traced.decode.control.me.address
    assert migrate.attributes["hisparse_pd.node"] == other.control.me.address
    assert migrate.attributes["hisparse_pd.tokens"] == 2
    assert "scripted" in migrate.attributes["hisparse_pd.reason"]
    assert "scripted" in (first.error or "")
    assert second.error is None
    assert first.end <= migrate.start + 1e-3 <= second.start + 2e-3
    assert len({span.trace_id for span in collector.spans}) == 1


def test_a_request_that_fails_is_a_failed_span(traced: World, collector: Collector) -> None:
    assert traced.http.get("/health").status_code == 200
    assert traced.http.get("/v1/models/other").status_code == 404
    assert traced.http.request("X" * 8000, "/v1/models").status_code == 405
    traced.decode.extra_outputs = [Output(request_id="-", start=0, finish_reason="error", error="scripted")]
    traced.decode.chunks = []
    assert traced.post(max_tokens=4).status_code == 500
    wait_until(lambda: collector.named("POST /v1/completions"))
    [lookup], [failed] = collector.named("GET /v1/models/{model}"), collector.named("POST /v1/completions")
    assert (lookup.error, failed.error) == (None, "HTTP status 500")
    assert len(collector.named("other /v1/models")) == 1, "a client chooses no names"
    assert collector.named("GET /health") == []


def test_without_an_endpoint_nodes_are_told_of_no_trace(fresh: World) -> None:
    body = {"prompt": "abc", "max_tokens": 2}
    assert fresh.http.post("/v1/completions", json=body, headers=PARENT).status_code == 200
    [generate] = fresh.decode.generated
    assert "traceparent" not in generate.model_dump(exclude_defaults=True)
