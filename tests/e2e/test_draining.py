"""Processes that are told to stop while clients are served: nobody notices, and nothing is left behind."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.asking import Job, Load, complete, ids_in, random_prompts, streamed
from tests.e2e.cluster import HOT_BUFFER, Node, wait_until
from tests.e2e.conftest import References, StartCluster, StartPair

JOBS = [Job(prompt, tokens) for prompt in random_prompts((30, 129, 200, 400), seed=3) for tokens in (8, 32)]


def holds_nothing(node: Node) -> bool:
    if node.name.startswith("prefill"):
        return node.metric("prefill_pages", state="used") == 0
    return all(node.metric("host_slots", state=state) == 0 for state in ("used", "quarantined")) and (
        node.metric("device_slots", state="used") == 0
    )


@pytest.mark.slow
def test_nodes_replaced_under_load_cost_no_client_anything(start_cluster: StartCluster, references: References) -> None:
    cluster = start_cluster()
    prefills = [
        cluster.prefill(f"prefill-{i}", chunked_prefill_size=64, context_length=4096, max_total_tokens=4096)
        for i in range(2)
    ]
    decodes = [cluster.decode(f"decode-{i}", hisparse_config=HOT_BUFFER, max_running_requests=8) for i in range(2)]
    cluster.wait_ready()

    with Load([cluster.url], references["deepseek_v32"], JOBS).running(6) as clients:
        for leaving in (decodes[0], prefills[0]):
            clients.wait_for_more(6)
            wait_until(lambda node=leaving: not holds_nothing(node), what=f"{leaving.name} to have work")
            leaving.signal(signal.SIGTERM)
            assert leaving.process.wait(timeout=90) == 0, leaving.log[-3000:]
            clients.wait_for_more(6)
        for node in (decodes[1], prefills[1]):
            node.check_alive()

    for node in (decodes[1], prefills[1]):
        wait_until(lambda node=node: holds_nothing(node), what=f"{node.name} to hold nothing")
        assert node.metric("transfer_failures_total", reason="prefill") == 0
        assert node.metric("transfer_failures_total", reason="write") == 0


def test_a_process_that_drains_says_so_and_a_second_signal_ends_it(start_pair: StartPair) -> None:
    cluster, _, decode = start_pair()
    with streamed(cluster.url, [1] * 50, 8000) as lines:
        next(lines)
        decode.signal(signal.SIGTERM)
        wait_until(lambda: decode.get("/ready").status_code == 503)
        assert decode.get("/ready").json()["reason"] == "draining"
        assert decode.get("/health").status_code == 200
        wait_until(lambda: cluster.nodes["gateway"].metric("nodes", role="decode") == 0)
        refused = httpx.post(f"{cluster.url}/v1/completions", json={"model": "tiny", "prompt": [1], "max_tokens": 1})
        assert refused.status_code == 503
        decode.signal(signal.SIGTERM)
        assert decode.process.wait(timeout=20) == 0
        assert any('"error"' in line for line in lines)


@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_what_streams_is_finished(start_pair: StartPair, references: References, role: str) -> None:
    cluster, _, _ = start_pair()
    prompt = [5, 6, 7] * 40
    with streamed(cluster.url, prompt, 150) as lines:
        ids = ids_in(next(lines))
        cluster.nodes[role].signal(signal.SIGTERM)
        ids += [token_id for line in lines for token_id in ids_in(line)]
    assert len(ids) == 150
    assert ids == references["deepseek_v32"].likeliest(prompt, ids)
    assert cluster.nodes[role].process.wait(timeout=30) == 0


def test_what_is_left_at_the_drain_timeout_is_ended(start_pair: StartPair) -> None:
    cluster, _, decode = start_pair(drain_timeout=1)
    with streamed(cluster.url, [1] * 50, 8000) as lines:
        next(lines)
        decode.signal(signal.SIGTERM)
        assert any('"error"' in line for line in lines)
    assert decode.process.wait(timeout=20) == 0
    assert "the decode node is stopping" in decode.log


def test_a_prefill_node_finishes_the_prompt_that_it_computes(start_pair: StartPair, references: References) -> None:
    """It is the only one: handed back, the request would wait for another."""
    cluster, prefill, decode = start_pair({"chunked_prefill_size": 64})
    prompt = [7, 3, 9, 200, 41] * 240
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(prompt, 8)])
        wait_until(lambda: prefill.metric("prompt_tokens_total") > 0, what="the first chunk")
        prefill.signal(signal.SIGTERM)
        assert answer.result() == [references["deepseek_v32"].generate(prompt, 8)]
    assert prefill.process.wait(timeout=30) == 0
    assert decode.metric("prefill_retries_total") == 0
    assert decode.metric("host_slots", state="quarantined") == 0


@pytest.mark.slow
def test_a_request_waits_for_the_successor_of_a_prefill_node(start_pair: StartPair, references: References) -> None:
    """A rolling update of a single prefill node: what it had not begun is computed by the process that replaces it."""
    cluster, prefill, decode = start_pair(
        {"chunked_prefill_size": 16, "context_length": 1216, "max_total_tokens": 1216}, prefill_retries=0
    )
    jobs = [Job([number, 3, 9, 200, 41] * 240, 8) for number in range(3)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(complete, cluster.url, jobs, concurrency=len(jobs))
        wait_until(lambda: prefill.metric("requests", state="computing") == 3, what="the requests to be queued")
        prefill.signal(signal.SIGTERM)
        assert prefill.process.wait(timeout=30) == 0
        assert decode.metric("host_slots", state="quarantined") == 0
        cluster.restart(prefill)
        reference = references["deepseek_v32"]
        assert answers.result() == [reference.generate(job.prompt_ids, job.max_tokens) for job in jobs]
    assert decode.metric("transfer_failures_total", reason="prefill") == 0
