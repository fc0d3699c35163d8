"""However a request comes to its KV: staged on the decode node, retracted and resumed, or prefilled again."""

import json
import time

import pytest

from tests.e2e.asking import leave_when, random_prompts
from tests.e2e.cluster import HOT_BUFFER, wait_until
from tests.e2e.conftest import FAMILIES, TOKEN_BYTES, References, StartCluster, StartPair
from tests.e2e.test_parity import ALONE, TOGETHER, assert_exact, assert_same_logprobs


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_local_prefill_says_the_same(start_cluster: StartCluster, references: References, family: str) -> None:
    cluster = start_cluster(family)
    decode = cluster.decode(hisparse_config=HOT_BUFFER, allow_local_prefill=True, chunked_prefill_size=200)
    cluster.wait_ready()

    assert_exact(cluster, references[family], TOGETHER, concurrency=16)
    assert_same_logprobs(cluster, references[family], random_prompts((2, 450), seed=8))

    assert "event=staged" in decode.log
    decode.wait_unused("host_slots")


def test_clients_that_leave_in_local_prefill_leave_nothing(start_cluster: StartCluster, references: References) -> None:
    """sglang PR 22131: a request given up while in staging leaked or was freed twice."""
    cluster = start_cluster()
    decode = cluster.decode(hisparse_config=HOT_BUFFER, allow_local_prefill=True, chunked_prefill_size=64)
    cluster.wait_ready()
    body = {"model": "tiny", "prompt": random_prompts((3000,))[0], "max_tokens": 3000, "ignore_eos": True}
    states = ("local_prefill", "staging", "running")
    for patience in (0.0, 0.3, 1.2):
        aborted = decode.metric("requests_finished_total", reason="abort")
        begun: list[float] = []

        def has_waited(begun: list[float] = begun, patience: float = patience) -> bool:
            if any(decode.metric("requests", state=state) for state in states):
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() - begun[0] >= patience

        leave_when(has_waited, cluster.url, body)
        wait_until(
            lambda before=aborted: decode.metric("requests_finished_total", reason="abort") > before, what="the abort"
        )
        decode.wait_unused("host_slots")
        assert decode.metric("device_slots", state="used") == 0
    assert_exact(cluster, references["deepseek_v32"], [ALONE[4]], concurrency=1)


@pytest.mark.parametrize("family", [FAMILIES[1], pytest.param(FAMILIES[0], marks=pytest.mark.slow)])
def test_requests_that_were_retracted_say_the_same(start_pair: StartPair, references: References, family: str) -> None:
    """Device slots for two full hot buffers, and a dozen short requests that grow beyond what was kept for them."""
    config = json.dumps({"device_buffer_size": 256, "host_pool_gib": 0.02})
    cluster, _, decode = start_pair(family=family, hisparse_config=config, max_device_slots=2 * 288)
    batch = random_prompts((10, 20, 30, 40, 50, 60, 12, 22, 32, 42, 52, 500), seed=4)
    assert_exact(cluster, references[family], batch, concurrency=12, new_tokens=110)

    assert decode.metric("retractions_total", pool="device") > 0
    decode.wait_unused("device_slots")


def test_requests_that_lost_their_host_slots_say_the_same(start_pair: StartPair, references: References) -> None:
    """A host pool that all prompts fit, but not all that they grow to: the youngest are prefilled again."""
    config = json.dumps({"device_buffer_size": 128, "host_pool_gib": 900 * TOKEN_BYTES / 2**30})
    cluster, _, decode = start_pair({"context_length": 512}, context_length=512, hisparse_config=config)
    batch = random_prompts((100, 90, 110, 80, 120, 70, 130, 100), seed=2)

    assert_exact(cluster, references["deepseek_v32"], batch, concurrency=8)

    assert decode.metric("retractions_total", pool="host") > 0
    decode.wait_unused("host_slots")
