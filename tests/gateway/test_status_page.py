"""/v1/cluster and the files of /status: what they say, and to whom."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from control.messages import Heartbeat, NodeTotals
from gateway import cluster_status
from gateway.cluster_status import SAMPLES, ClusterStatus
from tests.gateway.nodes import wait_until
from tests.gateway.test_access import key_file, refused, status_with
from tests.gateway.world import RunningGateway, World

Start = Callable[..., RunningGateway]
FILES = ("/status", "/status.css", "/status.js")
ON = pytest.mark.parametrize("fresh", [{"status_page": True}], indirect=True)


@pytest.fixture(autouse=True)
def sample_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_status, "SAMPLE_S", 0.02)


def reported(world: World) -> dict[str, Any]:
    answer = world.http.get("/v1/cluster")
    assert answer.status_code == 200
    report: dict[str, Any] = answer.json()
    return report


def decode_nodes(world: World) -> list[dict[str, Any]]:
    return [node for node in reported(world)["nodes"] if node["role"] == "decode"]


@ON
def test_a_node_is_reported_with_its_load(fresh: World) -> None:
    fresh.decode.membership.heartbeat = lambda via: Heartbeat(  # type: ignore[method-assign]
        via=via, ready=True, queued_tokens=700, running_requests=3, kv_usage=0.25, hot_usage=0.5
    )
    wait_until(lambda: decode_nodes(fresh)[0]["history"]["kv_usage"][-1:] == [0.25])
    report = reported(fresh)
    assert (report["unready"], report["samples"]) == (None, SAMPLES)
    assert {node["role"] for node in report["nodes"]} == {"prefill", "decode"}
    [node] = decode_nodes(fresh)
    assert node["address"] == fresh.decode.me.address
    said = {name: node[name] for name in ("state", "running_requests", "queued_tokens", "kv_usage", "hot_usage")}
    assert said == {
        "state": "ready",
        "running_requests": 3,
        "queued_tokens": 700,
        "kv_usage": 0.25,
        "hot_usage": 0.5,
    }
    assert node["cached_tokens"] == 0
    assert node["history"]["running_requests"][-1] == 3
    assert node["history"]["queued_tokens"][-1] == 700


@ON
def test_what_nodes_count_since_their_start_is_reported_by_time(fresh: World) -> None:
    counted = itertools.count(1)
    fresh.decode.membership.heartbeat = lambda via: Heartbeat(  # type: ignore[method-assign]
        via=via,
        ready=True,
        queued_tokens=0,
        totals=NodeTotals(hits=(now := next(counted)) * 90, misses=now * 10, swapped_bytes=now * 1000),
    )
    wait_until(lambda: decode_nodes(fresh)[0]["misses"] >= 20)
    [node] = decode_nodes(fresh)
    assert node["hits"] == 9 * node["misses"]
    assert max(rate for rate in node["history"]["swapped_bytes_per_s"] if rate is not None) > 0
    assert node["history"]["transferred_bytes_per_s"][-1] == 0


@ON
def test_tokens_and_prefix_hits_of_live_and_ended_requests_count_once(fresh: World) -> None:
    fresh.decode.cached_tokens = (2, 0)
    wait_until(lambda: decode_nodes(fresh)[0]["history"]["tokens_per_s"])
    assert fresh.post(prompt="abcd", max_tokens=5).status_code == 200
    fresh.decode.hold_after = 3
    with fresh.stream(prompt="abcd", max_tokens=9) as data:
        next(data)
        wait_until(lambda: decode_nodes(fresh)[0]["prompt_tokens"] == 8)
        [node] = decode_nodes(fresh)
        assert (node["prefix_hit_tokens"], node["requests"], node["waiting"]) == (2, 1, 0)
        assert any(node["history"]["tokens_per_s"])
    wait_until(lambda: not reported(fresh)["slowest"])
    assert decode_nodes(fresh)[0]["prompt_tokens"] == 8


@ON
def test_a_request_is_reported_with_where_it_is(fresh: World) -> None:
    fresh.decode.hold_after = 0
    waiting = fresh.post_later(prompt="abcd", max_tokens=9)
    wait_until(lambda: reported(fresh)["phases"] == {"placing": 0, "waiting": 1, "streaming": 0})
    wait_until(lambda: bool(fresh.decode.generated))
    [request] = reported(fresh)["slowest"]
    assert request["request_id"] == fresh.decode.generated[0].request_id
    assert (request["phase"], request["node"]) == ("waiting", fresh.decode.me.address)
    assert (request["prompt_tokens"], request["tokens"], request["migrations"]) == (4, 0, 0)
    assert request["age_s"] == request["idle_s"]
    other = fresh.start_decode()
    other.hold_after = 2
    fresh.decode.die()
    wait_until(lambda: [request["tokens"] for request in reported(fresh)["slowest"]] == [2])
    [request] = reported(fresh)["slowest"]
    assert (request["phase"], request["node"], request["migrations"]) == ("streaming", other.me.address, 1)
    states = {fresh.decode.me.address: "lost", other.me.address: "ready"}
    wait_until(lambda: {node["address"]: node["state"] for node in decode_nodes(fresh)} == states)
    wait_until(lambda: any(node["history"]["kv_usage"][-1:] == [None] for node in decode_nodes(fresh)))
    other.die()
    assert waiting.result().status_code == 500
    assert "decode node" in reported(fresh)["unready"]


@ON
def test_requests_that_wait_longest_come_first_and_then_the_oldest(fresh: World) -> None:
    fresh.decode.hold_after = 0
    posted = [fresh.post_later(prompt="a" * length, max_tokens=2) for length in (1, 2, 3)]
    wait_until(lambda: reported(fresh)["phases"]["waiting"] == 3)
    generations = fresh.gateway.gateway._client.generations
    first, second, third = sorted(generations, key=lambda each: each.request.arrived)
    third.progress_at -= 5
    first.progress_at -= 0.1
    found = [request["request_id"] for request in reported(fresh)["slowest"]]
    assert found == [each.request.request_id for each in (third, first, second)]
    fresh.decode.die()
    assert {each.result().status_code for each in posted} == {503}


def test_the_history_of_a_node_is_bounded_and_goes_with_it(fresh: World) -> None:
    gateway = fresh.gateway.gateway
    status = ClusterStatus(gateway.registry, gateway._client, lambda: None)
    for second in range(SAMPLES + 10):
        status.sample(float(second))
    assert {len(node["history"]["kv_usage"]) for node in status.report(0.0)["nodes"]} == {SAMPLES}
    gateway.registry.nodes.clear()
    status.sample(1000.0)
    assert status._sampled == {}


def test_without_the_flag_there_is_no_page(gateway: RunningGateway) -> None:
    assert {httpx.get(gateway.url + path).status_code for path in (*FILES, "/v1/cluster")} == {404}
    assert gateway.gateway._cluster is None


@pytest.mark.parametrize("gateway", [{"status_page": True}], indirect=True)
def test_without_keys_everyone_sees_the_page(gateway: RunningGateway) -> None:
    assert [status_with(gateway, None, path) for path in (*FILES, "/v1/cluster")] == [200] * 4
    assert httpx.get(f"{gateway.url}/v1/cluster").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("gateway", [{"status_page": True}], indirect=True)
def test_the_page_takes_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    for path in FILES:
        answer = httpx.get(gateway.url + path)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|\son\w+=| style=", answer.text) == []


def test_where_clients_need_keys_operators_do_too(start_gateway: Start, tmp_path: Path, look_often: None) -> None:
    file = key_file(tmp_path, "sk-ops name=ops\n")
    gateway = start_gateway(api_keys=("sk-client",), operator_key_file=file, status_page=True)
    for path in FILES:
        assert status_with(gateway, None, path) == 200
    assert [status_with(gateway, key, "/v1/cluster") for key in (None, "sk-wrong", "sk-client", "sk-ops")] == [
        401,
        401,
        403,
        200,
    ]
    assert (refused(gateway, "api_key"), refused(gateway, "operator")) == (2, 1)
    assert status_with(gateway, "sk-ops") == 200
    key_file(tmp_path, "sk-other\n")
    assert status_with(gateway, "sk-ops", "/v1/cluster") == 401


def test_operators_look_at_a_gateway_that_takes_no_more_requests(start_gateway: Start, tmp_path: Path) -> None:
    gateway = start_gateway(api_keys=("sk-client",), operator_key_file=key_file(tmp_path, "sk-ops\n"), status_page=True)
    gateway.gateway._admission.serving = 1024
    assert status_with(gateway, "sk-client") == 429
    assert status_with(gateway, "sk-ops", "/v1/cluster") == 200
