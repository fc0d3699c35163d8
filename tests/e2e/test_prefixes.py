"""What a decode node has, nobody sends to it again, and the tokens are those of transformers all the same."""

import json
import random
import time

import pytest

from tests.e2e.asking import Job, ask, complete, ids_of, whole_blocks
from tests.e2e.cluster import wait_until
from tests.e2e.conftest import FAMILIES, TOKEN_BYTES, References, StartCluster

LENGTH = 200
SHARED = (0, 1, 63, 64, 65, LENGTH - 1, LENGTH)
"""Tokens that prompts have in common with the first one."""
NEW_TOKENS = 12
HOT_BUFFER = {"device_buffer_size": 64}


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    first = [rng.randrange(256) for _ in range(LENGTH)]
    return [first] + [
        [*first[:shared], *(rng.randrange(256) for _ in range(min(LENGTH - shared + 7, 150)))] for shared in SHARED
    ]


@pytest.mark.parametrize("family", [FAMILIES[1], pytest.param(FAMILIES[0], marks=pytest.mark.slow)])
def test_cached_prefixes_give_the_same_tokens(start_cluster: StartCluster, references: References, family: str) -> None:
    """A node with room for everything, cold and warm, and one that gives up what it has for each request."""
    cluster = start_cluster(family)
    common = {"context_length": 512}
    prefill = cluster.prefill(**common, transfer_checksum="full", chunked_prefill_size=100)
    verified = {**common, "debug_verify_swap_in": True}
    roomy = cluster.decode("roomy", **verified, hisparse_config=json.dumps({**HOT_BUFFER, "host_pool_gib": 0.02}))
    cluster.wait_ready()
    batch = prompts()

    def ask_all(concurrency: int) -> list[list[int]]:
        return complete(cluster.url, [Job(prompt, NEW_TOKENS) for prompt in batch], concurrency)

    # Cold: prompts one after the other, each of which finds what it shares with the first.
    cold = ask_all(1)
    for prompt, answer in zip(batch, cold, strict=True):
        assert answer == references[family].likeliest(prompt, answer)
    tokens = sum(len(prompt) - 1 for prompt in batch)
    hits = sum(whole_blocks(shared) for shared in SHARED)
    assert roomy.metric("prefix_cache_queries_total", side="decode") == tokens
    assert roomy.metric("prefix_cache_hits_total", side="decode") == hits
    token_bytes = prefill.metric("transfer_bytes_total") / (tokens - hits)
    assert token_bytes == TOKEN_BYTES - (0 if family == FAMILIES[0] else 4 * 32), "one index layer less"

    # Warm: whole blocks of all prompts are there.
    assert ask_all(4) == cold
    hits += sum(whole_blocks(len(prompt) - 1) for prompt in batch)
    assert roomy.metric("prefix_cache_hits_total", side="decode") == hits
    assert prefill.metric("transfer_bytes_total") == (2 * tokens - hits) * token_bytes

    # A conversation: each turn sends all before it, answers included.
    text, computed = batch[0], prefill.metric("prompt_tokens_total")
    for turn in range(3):
        answer = ask(cluster.url, text, 70)
        new = ids_of(answer)
        assert new == references[family].likeliest(text, new)
        before, computed = computed, prefill.metric("prompt_tokens_total")
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(text) - 1 - (computed - before), "what was not computed"
        assert turn > 0 or cached >= whole_blocks(LENGTH - 1)
        text = [*text, *new, turn, turn + 1]
    roomy.wait_unused("host_slots")
    assert roomy.metric("host_slots", state="cached") > LENGTH

    # Four answers to one prompt: its KV is sent once, and they are what four requests with the same seeds get.
    new_prompt = list(reversed(batch[0]))

    def choices(**fields: object) -> list[list[int]]:
        answer = ask(cluster.url, new_prompt, 20, temperature=2, **fields)
        return [choice["token_ids"] for choice in answer["choices"]]

    sent = prefill.metric("transfer_bytes_total")
    together = choices(n=4, seed=11)
    assert prefill.metric("transfer_bytes_total") - sent == (LENGTH - 1) * token_bytes
    assert together == [choices(seed=11 + index)[0] for index in range(4)]
    assert len(set(map(tuple, together))) == 4
    roomy.wait_unused("host_slots")
    roomy.kill()
    cluster.nodes.pop("roomy")

    pool = 600 * TOKEN_BYTES / 2**30
    tight = cluster.decode("tight", **verified, hisparse_config=json.dumps({**HOT_BUFFER, "host_pool_gib": pool}))
    cluster.wait_ready()
    for _ in range(2):
        assert ask_all(4) == cold

    # Two prompts at once go to two nodes, and come back to the one that has them.
    other = cluster.decode("other", **common)
    cluster.wait_ready()
    rng = random.Random(9)

    def come_back() -> bool:
        jobs = [Job([rng.randrange(256) for _ in range(LENGTH)], NEW_TOKENS) for _ in range(2)]
        complete(cluster.url, jobs, concurrency=2)
        before = [node.metric("prefix_cache_hits_total", side="decode") for node in (tight, other)]
        for job in jobs:
            time.sleep(1.5)  # until nodes have told the gateway what they have, and that they are empty
            complete(cluster.url, [job])
        after = [node.metric("prefix_cache_hits_total", side="decode") for node in (tight, other)]
        return [now - then for now, then in zip(after, before, strict=True)] == [whole_blocks(LENGTH - 1)] * 2

    wait_until(come_back, 60, "a machine that is quiet enough for nodes to be heard in time")
    for node in (tight, other):
        node.wait_unused("host_slots")
        assert node.metric("host_slots", state="quarantined") == 0
