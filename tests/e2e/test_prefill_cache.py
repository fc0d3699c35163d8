"""What a prefill node has, it does not compute again, and the tokens are those of transformers all the same."""

import random

import pytest

from tests.e2e.asking import Job, complete
from tests.e2e.conftest import FAMILIES, References, StartCluster

LENGTH = 200
SHARED = (0, 1, 63, 64, 65, LENGTH - 1)
"""Tokens that prompts have in common with the first one."""
NEW_TOKENS = 12


def prompts() -> list[list[int]]:
    """The last token of a prompt is computed by the decode node."""
    rng = random.Random(4)
    first = [rng.randrange(256) for _ in range(LENGTH)]
    return [
        [*first[:shared], *(rng.randrange(256) for _ in range(LENGTH - shared + 7))] for shared in (LENGTH, *SHARED)
    ]


@pytest.mark.parametrize(
    ("family", "page_size", "chunk"),
    [
        (FAMILIES[0], 16, 100),
        pytest.param(FAMILIES[1], 64, 2048, marks=pytest.mark.slow),
        pytest.param(FAMILIES[1], 128, 100, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_whether_a_prefix_was_cached_or_computed(
    start_cluster: StartCluster, references: References, device: str, family: str, page_size: int, chunk: int
) -> None:
    """A node with room for everything, cold and warm."""
    cluster = start_cluster(family)
    common = {"device": device, "page_size": page_size, "chunked_prefill_size": chunk, "context_length": 256}
    prefill = cluster.prefill(**common, max_total_tokens=4096, transfer_checksum="full")
    decode = cluster.decode(device=device, context_length=256, no_enable_prefix_caching=True)
    cluster.wait_ready()
    batch = prompts()

    def ask(concurrency: int) -> list[list[int]]:
        return complete(cluster.url, [Job(prompt, NEW_TOKENS) for prompt in batch], concurrency)

    cold = ask(1)
    for prompt, answer in zip(batch, cold, strict=True):
        assert answer == references[family].likeliest(prompt, answer)
    tokens = sum(len(prompt) - 1 for prompt in batch)
    cached = sum(shared // 64 * 64 for shared in SHARED) if page_size <= 64 else 0
    assert prefill.metric("prefix_cache_hits_total", side="prefill") == cached
    assert prefill.metric("prompt_tokens_total") == tokens - cached
    token_bytes = prefill.metric("transfer_bytes_total") / tokens
    assert ask(4) == cold
    cached += sum((len(prompt) - 1) // 64 * 64 for prompt in batch) if page_size <= 64 else 0
    assert prefill.metric("prefix_cache_hits_total", side="prefill") == cached
    assert prefill.metric("prompt_tokens_total") == 2 * tokens - cached
    assert prefill.metric("transfer_bytes_total") == 2 * tokens * token_bytes, "all is sent, cached or not"
    decode.wait_unused("host_slots")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "page_size"), [(FAMILIES[0], 64), (FAMILIES[1], 16)])
def test_tokens_are_the_same_where_each_prompt_displaces_what_is_cached(
    start_cluster: StartCluster, references: References, device: str, family: str, page_size: int
) -> None:
    cluster = start_cluster(family)
    common = {"device": device, "context_length": 256}
    prefill = cluster.prefill(**common, page_size=page_size, chunked_prefill_size=100, max_total_tokens=320)
    decode = cluster.decode(device=device, context_length=256, no_enable_prefix_caching=True)
    cluster.wait_ready()
    batch = prompts()
    for concurrency in (1, 4):
        answers = complete(cluster.url, [Job(prompt, NEW_TOKENS) for prompt in batch], concurrency)
        for prompt, answer in zip(batch, answers, strict=True):
            assert answer == references[family].likeliest(prompt, answer)
    prefill.wait_unused("prefill_pages")
    free, cached = (prefill.metric("prefill_pages", state=state) for state in ("free", "cached"))
    assert free + cached == 320 // page_size
    decode.wait_unused("host_slots")
