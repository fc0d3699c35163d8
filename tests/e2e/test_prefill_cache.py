"""What a prefill node has, it does not compute again, and the tokens are those of transformers all the same."""

import random
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster, Job, complete
from tests.e2e.conftest import FAMILIES, Reference

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
    start_cluster: Callable[..., Cluster],
    references: dict[str, Reference],
    device: str,
    family: str,
    page_size: int,
    chunk: int,
) -> None:
    """A node with room for everything, cold and warm, and one that gives up what it has for each prompt."""
    cluster = start_cluster(family)
    common = {"device": device, "page_size": page_size, "chunked_prefill_size": chunk, "context_length": 256}
    roomy = cluster.prefill("roomy", **common, max_total_tokens=4096, transfer_checksum="full")
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
    assert roomy.metric("prefix_cache_hits_total", side="prefill") == cached
    assert roomy.metric("prompt_tokens_total") == tokens - cached
    token_bytes = roomy.metric("transfer_bytes_total") / tokens
    assert ask(4) == cold
    cached += sum((len(prompt) - 1) // 64 * 64 for prompt in batch) if page_size <= 64 else 0
    assert roomy.metric("prefix_cache_hits_total", side="prefill") == cached
    assert roomy.metric("prompt_tokens_total") == 2 * tokens - cached
    assert roomy.metric("transfer_bytes_total") == 2 * tokens * token_bytes, "all is sent, cached or not"
    roomy.kill()

    tight = cluster.prefill("tight", **common, max_total_tokens=320)
    cluster.nodes.pop("roomy")
    cluster.wait_ready()
    assert ask(4) == cold
    pages = 320 // page_size
    assert tight.metric("prefill_pages", state="used") == 0
    assert tight.metric("prefill_pages", state="free") + tight.metric("prefill_pages", state="cached") == pages
    assert decode.metric("host_slots", state="used") == 0
