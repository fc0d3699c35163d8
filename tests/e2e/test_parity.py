"""The service says, token for token, what transformers says."""

import json
import random
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster, Job, complete
from tests.e2e.conftest import FAMILIES, TOKEN_BYTES, Reference

HOT_BUFFER = json.dumps({"device_buffer_size": 128})
NEW_TOKENS = 64
LENGTHS = (1, 63, 64, 65, 500, 3000)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


ALONE = prompts(LENGTHS)
TOGETHER = ALONE + prompts((2, 17, 100, 127, 128, 129, 130, 200, 256, 300), seed=1)


def assert_exact(
    cluster: Cluster,
    reference: Reference,
    batch: list[list[int]],
    concurrency: int,
    new_tokens: int = NEW_TOKENS,
) -> None:
    answers = complete(cluster.url, [Job(prompt, new_tokens) for prompt in batch], concurrency)
    for prompt, answer in zip(batch, answers, strict=True):
        assert answer == reference.generate(prompt, new_tokens), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 100), (16, 512), (64, 333)])
def test_greedy_tokens_equal_transformers(
    start_cluster: Callable[..., Cluster],
    references: dict[str, Reference],
    family: str,
    page_size: int,
    chunk: int,
) -> None:
    cluster = start_cluster(family)
    prefill = cluster.prefill(page_size=page_size, chunked_prefill_size=chunk)
    decode = cluster.decode(hisparse_config=HOT_BUFFER, debug_verify_swap_in=True)
    cluster.wait_ready()

    assert_exact(cluster, references[family], ALONE, concurrency=1)
    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert prefill.metric("prompt_tokens_total") >= sum(map(len, ALONE + TOGETHER))
    assert prefill.metric("transfer_bytes_total") > 0
    assert decode.metric("swap_in_misses_total") > 0
    assert decode.metric("host_slots", state="used") == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_that_prefills_for_itself_says_the_same(
    start_cluster: Callable[..., Cluster], references: dict[str, Reference], family: str
) -> None:
    cluster = start_cluster(family)
    decode = cluster.decode(hisparse_config=HOT_BUFFER, allow_local_prefill=True, chunked_prefill_size=200)
    cluster.wait_ready()

    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert "event=staged" in decode.log
    assert decode.metric("host_slots", state="used") == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_were_retracted_say_the_same(
    start_cluster: Callable[..., Cluster], references: dict[str, Reference], family: str
) -> None:
    """Device slots for two full hot buffers, and a dozen short requests that grow beyond what was kept for them."""
    cluster = start_cluster(family)
    cluster.prefill()
    config = json.dumps({"device_buffer_size": 256, "host_pool_gib": 0.02})
    decode = cluster.decode(hisparse_config=config, max_device_slots=2 * 257)
    cluster.wait_ready()

    batch = prompts((10, 20, 30, 40, 50, 60, 12, 22, 32, 42, 52, 500), seed=4)

    assert_exact(cluster, references[family], batch, concurrency=12, new_tokens=110)

    assert decode.metric("retractions_total", pool="device") > 0
    assert decode.metric("device_slots", state="used") == 0


def test_requests_that_lost_their_host_slots_say_the_same(
    start_cluster: Callable[..., Cluster], references: dict[str, Reference]
) -> None:
    """A host pool that all prompts fit, but not all that they grow to: the youngest are prefilled again."""
    cluster = start_cluster()
    cluster.prefill(context_length=512)
    config = json.dumps({"device_buffer_size": 128, "host_pool_gib": 900 * TOKEN_BYTES / 2**30})
    decode = cluster.decode(context_length=512, hisparse_config=config)
    cluster.wait_ready()
    batch = prompts((100, 90, 110, 80, 120, 70, 130, 100), seed=2)

    assert_exact(cluster, references["deepseek_v32"], batch, concurrency=8)

    assert decode.metric("retractions_total", pool="host") > 0
    assert decode.metric("host_slots", state="used") == 0
