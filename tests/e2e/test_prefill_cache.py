"""What a prefill node has, it does not compute again, and the tokens are those of transformers all the same."""

import pytest

from tests.e2e.asking import Job, assert_exact, whole_blocks
from tests.e2e.conftest import FAMILIES, References, StartPair
from tests.e2e.test_prefixes import NEW_TOKENS, SHARED, prompts

JOBS = [Job(prompt, NEW_TOKENS) for prompt in prompts()]
TOKENS = sum(len(job.prompt_ids) - 1 for job in JOBS)
"""The last token of a prompt is computed by the decode node."""
UNCACHED = {"context_length": 256, "no_enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("family", "page_size", "chunk"),
    [
        (FAMILIES[0], 16, 100),
        pytest.param(FAMILIES[1], 64, 2048, marks=pytest.mark.slow),
        pytest.param(FAMILIES[1], 128, 100, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_whether_a_prefix_was_cached_or_computed(
    start_pair: StartPair, references: References, family: str, page_size: int, chunk: int
) -> None:
    """A node with room for everything, cold and warm."""
    flags = {"page_size": page_size, "chunked_prefill_size": chunk, "context_length": 256, "max_total_tokens": 4096}
    cluster, prefill, decode = start_pair({**flags, "transfer_checksum": "full"}, family, **UNCACHED)
    caches = page_size <= 64
    cached, token_bytes = 0, 0.0
    cold, warm = SHARED, [len(job.prompt_ids) - 1 for job in JOBS]
    for passes, (concurrency, known) in enumerate(((1, cold), (4, warm)), start=1):
        assert_exact(cluster.url, references[family], JOBS, concurrency)
        cached += sum(map(whole_blocks, known)) if caches else 0
        assert prefill.metric("prefix_cache_hits_total", side="prefill") == cached
        assert prefill.metric("prompt_tokens_total") == passes * TOKENS - cached
        token_bytes = token_bytes or prefill.metric("transfer_bytes_total") / TOKENS
        assert prefill.metric("transfer_bytes_total") == passes * TOKENS * token_bytes, "all is sent, cached or not"
    decode.wait_unused("host_slots")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "page_size"), [(FAMILIES[0], 64), (FAMILIES[1], 16)])
def test_tokens_are_the_same_where_each_prompt_displaces_what_is_cached(
    start_pair: StartPair, references: References, family: str, page_size: int
) -> None:
    flags = {"context_length": 256, "page_size": page_size, "chunked_prefill_size": 100, "max_total_tokens": 320}
    cluster, prefill, decode = start_pair(flags, family, **UNCACHED)
    for concurrency in (1, 4):
        assert_exact(cluster.url, references[family], JOBS, concurrency)
    prefill.wait_unused("prefill_pages")
    free, cached = (prefill.metric("prefill_pages", state=state) for state in ("free", "cached"))
    assert free + cached == 320 // page_size
    decode.wait_unused("host_slots")
