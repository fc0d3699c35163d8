"""What dies, and what that costs the others."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.asking import Job, assert_exact, complete, streamed
from tests.e2e.cluster import HOT_BUFFER, wait_until
from tests.e2e.conftest import TOKEN_BYTES, References, StartCluster, StartPair

PROMPT = [7, 3, 9, 200, 41] * 60


def test_a_killed_prefill_node_costs_its_requests_only_a_retry(start_pair: StartPair, references: References) -> None:
    """sglang 12779, 16903: a dead prefill node failed the decode node's health check, which had to be restarted."""
    cluster, prefill, decode = start_pair()
    other = cluster.prefill("prefill-1")
    cluster.wait_ready(prefill=2)
    expected = references["deepseek_v32"].generate(PROMPT, 16)
    for node in (prefill, other):
        node.signal(signal.SIGSTOP)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(PROMPT, 16)])
        wait_until(lambda: decode.metric("requests", state="prefilling") == 1, what="the prefill to be dispatched")
        [dispatched] = [line for line in decode.log.splitlines() if 'event="prefill dispatched"' in line]
        if f"node={other.control_address} " in dispatched:
            prefill, other = other, prefill
        prefill.kill()
        other.signal(signal.SIGCONT)
        assert decode.get("/health").status_code == 200
        assert decode.get("/ready").status_code == 200
        cluster.restart(prefill)
        assert answer.result() == [expected]

    assert decode.metric("prefill_retries_total") >= 1
    wait_until(lambda: decode.metric("host_slots", state="quarantined") == 0, what="quarantine to end")
    decode.wait_unused("host_slots")
    assert complete(cluster.url, [Job(PROMPT, 16)]) == [expected]


def test_requests_of_the_last_prefill_node_get_503_when_it_dies(start_pair: StartPair) -> None:
    """Accepted before anybody noticed, they would wait for another node until --request-timeout."""
    cluster, prefill, decode = start_pair()
    prefill.signal(signal.SIGSTOP)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{cluster.url}/v1/completions", json=body, timeout=60)
        wait_until(lambda: decode.metric("requests", state="prefilling") == 1, what="the prefill to be dispatched")
        prefill.kill()
        assert answer.result().status_code == 503
        assert answer.result().headers["retry-after"]
        assert "no live prefill node" in answer.result().json()["error"]["message"]


def test_a_prefill_node_that_stops_hands_requests_back(start_cluster: StartCluster, references: References) -> None:
    cluster = start_cluster()
    first = cluster.prefill("prefill-0", chunked_prefill_size=16)
    second = cluster.prefill("prefill-1", chunked_prefill_size=16)
    decode = cluster.decode(hisparse_config=HOT_BUFFER)
    cluster.wait_ready()
    prompt = PROMPT * 4
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(prompt, 8)])
        busy = wait_until(
            lambda: next((node for node in (first, second) if node.metric("prompt_tokens_total") > 0), None)
        )
        busy.signal(signal.SIGINT)
        assert answer.result() == [references["deepseek_v32"].generate(prompt, 8)]
    assert busy.process.wait(timeout=30) == 0
    assert decode.metric("prefill_retries_total") == 1
    assert "the prefill node is stopping" in decode.log
    assert decode.metric("host_slots", state="quarantined") == 0


def test_a_restarted_gateway_finds_its_nodes_and_requests_end(start_pair: StartPair, references: References) -> None:
    cluster, _, decode = start_pair()
    gateway = cluster.nodes["gateway"]
    with streamed(cluster.url, PROMPT, 7000) as lines:
        next(lines)
        gateway.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert decode.get("/health").status_code == 200
    cluster.restart(gateway)
    cluster.wait_ready()
    decode.wait_unused("host_slots")
    assert_exact(cluster.url, references["deepseek_v32"], [Job(PROMPT, 8)])


def test_a_full_queue_is_429_with_retry_after_and_reopens(start_pair: StartPair) -> None:
    config = json.dumps({"device_buffer_size": 128, "host_pool_gib": 1100 * TOKEN_BYTES / 2**30})
    flags = {"max_running_requests": 1, "max_queued_requests": 1, "context_length": 1024}
    cluster, _, _ = start_pair(hisparse_config=config, **flags)
    body = {"model": "tiny", "prompt": [1] * 800, "max_tokens": 100, "ignore_eos": True, "temperature": 0}

    def post(_: int) -> httpx.Response:
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(post, range(4)))
    codes = sorted(response.status_code for response in responses)
    assert codes[0] == 200
    assert codes[-1] == 429
    refused = next(response for response in responses if response.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"]
    assert post(0).status_code == 200
