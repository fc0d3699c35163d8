"""Each answer has an id, a line in the log, and a place in a metric; each node that is lost or found has a line."""

import re
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.access_log import endpoint_name
from gateway.errors import unavailable
from tests.gateway.nodes import wait_until
from tests.gateway.world import MODEL, World

Lines = list[MutableMapping[str, Any]]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def keyed(start_world: Callable[..., World], tmp_path: Path) -> World:
    keys = tmp_path / "keys"
    keys.write_text("# of two teams\nsk-a name=search\nsk-b\n")
    keys.chmod(0o600)
    return start_world(api_key_file=keys)


def answered(lines: Lines, count: int = 1) -> Lines:
    """The lines of requests; the answer comes before its line."""
    found: Lines = []

    def complete() -> bool:
        found[:] = [line for line in lines if line["event"] == "answered" and line["log_level"] == "info"]
        return len(found) >= count

    wait_until(complete)
    return found


def test_the_line_of_a_request_tells_who_where_and_what(keyed: World, lines: Lines) -> None:
    keyed.decode.cached_tokens = (2,)
    headers = {"Authorization": "Bearer sk-a", "X-Request-Id": "mine-1"}
    answer = keyed.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    [line] = answered(lines)
    assert line.pop("seconds") >= line.pop("ttft_s") > 0
    assert line == {
        "event": "answered",
        "log_level": "info",
        "endpoint": "/v1/chat/completions",
        "http_request_id": "mine-1",
        "status": 200,
        "client": "search",
        "request_id": answer.json()["id"],
        "reason": "length",
        "nodes": keyed.decode.me.address,
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "cached_tokens": 2,
        "tokens": 4,
    }


def test_a_key_without_a_name_and_a_refused_one_are_told_apart(keyed: World, lines: Lines) -> None:
    for key in ("sk-b", "sk-c"):
        keyed.http.get("/v1/models", headers={"x-api-key": key})
    assert [(line["status"], line.get("client")) for line in answered(lines, 2)] == [(200, "unnamed"), (401, None)]


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "naïve".encode()], ids=repr)
def test_an_id_that_is_not_sane_is_replaced(world: World, lines: Lines, given: str | bytes | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    answer = world.http.post("/v1/messages", json={"model": MODEL, **CHAT}, headers=headers)
    [own] = answer.headers.get_list("x-request-id")
    assert re.fullmatch(r"req_[0-9a-f]{32}", own)
    assert answer.headers.get_list("request-id") == [own]
    assert answered(lines)[0]["http_request_id"] == own


def test_every_answer_has_an_id_and_is_counted_by_endpoint(fresh: World, lines: Lines) -> None:
    asked = [
        fresh.http.post("/v1/completions", json={"prompt": 1}),
        fresh.http.get("/v1/completions"),
        fresh.http.get(f"/v1/models/{MODEL}"),
        fresh.http.get("/v1/models/org/none"),
        fresh.http.get("/wp-login.php"),
        fresh.post(max_tokens=2, stream=True),
    ]
    assert all(answer.headers["x-request-id"] for answer in asked)
    expected = [
        ("/v1/completions", 400),
        ("/v1/completions", 405),
        ("/v1/models/{model}", 200),
        ("/v1/models/{model}", 404),
        ("other", 404),
        ("/v1/completions", 200),
    ]
    assert [(line["endpoint"], line["status"]) for line in answered(lines, len(asked))] == expected
    metrics = fresh.metrics()
    for endpoint, status in expected:
        assert f'hisparse_pd_http_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in metrics


def test_requests_refused_for_want_of_nodes_are_logged(fresh: World, lines: Lines) -> None:
    fresh.leaves(fresh.decode)
    assert fresh.post().status_code == unavailable("").status
    assert answered(lines)[0]["status"] == 503


def test_a_client_that_leaves_before_its_answer_is_499(fresh: World, lines: Lines) -> None:
    fresh.decode.hold_after = 1
    with fresh.stream() as events:
        next(events)
    assert (answered(lines)[0]["status"], answered(lines)[0]["reason"]) == (200, "cancelled")
    fresh.decode.hold_after = 0
    with pytest.raises(Exception, match="timed out"):
        fresh.http.post("/v1/completions", json={"prompt": "a"}, timeout=0.5)
    assert answered(lines, 2)[1]["status"] == 499


def test_a_node_that_dies_has_a_line(fresh: World, lines: Lines) -> None:
    node = fresh.start_prefill()
    node.die()
    expected = [("node registered", "info"), ("node lost", "warning")]
    wait_until(
        lambda: [(at["event"], at["log_level"]) for at in lines if at.get("node") == node.me.address] == expected
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models/", "/v1/models/{model}"),
        ("/v1/models/a/b", "/v1/models/{model}"),
        ("/v1/completions/", "other"),
        ("/", "other"),
    ],
)
def test_paths_have_few_names(path: str, name: str) -> None:
    assert endpoint_name(path) == name
