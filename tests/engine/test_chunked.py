"""Prompts are computed in chunks, first come, first served, and every page comes back."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.chunked import ChunkedPrefill, PrefillJob
from kvcache.page_cache import PageCache
from kvcache.paged_pool import PagedKVPool
from tests.prefill_node.fakes import LAYOUT, FakeModel

CPU = torch.device("cpu")
VOCAB = 1000


@dataclass(eq=False)
class NamedJob(PrefillJob):
    key: str


Computed = tuple[NamedJob, int, int]
"""Positions [start, stop) of a job."""


def chunked(
    num_pages: int = 8, page_size: int = 4, chunk_size: int = 6, is_caching: bool = False
) -> ChunkedPrefill[NamedJob]:
    cache = PageCache(PagedKVPool(LAYOUT, num_pages, page_size, CPU), is_caching)
    return ChunkedPrefill(cache.pool, chunk_size, cache)


def job(key: str, length: int) -> NamedJob:
    """Of so many tokens that are computed."""
    return NamedJob(torch.arange(length + 1), key)


def compute(prefill: ChunkedPrefill[NamedJob]) -> list[Computed]:
    """The next step; an empty list if no job can go on."""
    prefill.start_waiting()
    step = prefill.plan()
    if step is None:
        return []
    step.compute(FakeModel())  # type: ignore[arg-type]
    prefill.complete(step)
    return [(each, chunk.start, chunk.stop) for each, chunk in step.chunks]


def test_a_chunk_is_shared_by_several_requests() -> None:
    prefill = chunked(chunk_size=6)
    a, b = job("a", 4), job("b", 5)
    prefill.add(a)
    prefill.add(b)
    assert compute(prefill) == [(a, 0, 4), (b, 0, 2)]
    assert (a.remaining, b.remaining) == (0, 3)
    assert compute(prefill) == [(b, 2, 5)]


def test_a_started_prompt_has_its_pages_to_the_end() -> None:
    prefill = chunked(num_pages=3, page_size=4)
    a, b = job("a", 8), job("b", 8)
    prefill.add(a)
    prefill.add(b)
    compute(prefill)
    assert prefill.pool.free_pages == 1
    assert compute(prefill) == [(a, 6, 8)]
    assert compute(prefill) == []
    prefill.release(a)
    assert compute(prefill) == [(b, 0, 6)]


def test_a_started_job_uses_what_the_one_before_it_has_computed_meanwhile() -> None:
    prefill = chunked(num_pages=16, page_size=32, chunk_size=64, is_caching=True)
    first, second = job("a", 100), job("b", 200)
    prefill.add(first)
    prefill.add(second)
    assert compute(prefill) == [(first, 0, 64)]
    assert second.pages is not None, "it has started"
    before = second.pages
    assert compute(prefill) == [(first, 64, 100), (second, 64, 92)]
    assert before.tolist() != second.pages.tolist()
    assert compute(prefill) == [(second, 92, 156)], "it looks for no more once it computes"


def test_a_job_that_needs_every_token_computed_reuses_nothing() -> None:
    prefill = chunked(num_pages=8, page_size=32, chunk_size=100, is_caching=True)
    for name, prompt_logprobs in (("a", None), ("b", 0)):
        each = job(name, 100)
        each.prompt_logprobs = prompt_logprobs
        prefill.add(each)
        assert prefill.queued_tokens == 100
        assert compute(prefill) == [(each, 0, 100)]
        prefill.release(each)
    prefill.add(other := job("c", 100))
    assert compute(prefill) == [(other, 64, 100)]


@given(st.lists(st.integers(1, 24), max_size=6), st.integers(1, 9), st.sampled_from([1, 3, 4]))
def test_every_position_is_computed_once_and_lies_in_its_row(
    lengths: list[int], chunk_size: int, page_size: int
) -> None:
    prefill = chunked(num_pages=24, page_size=page_size, chunk_size=chunk_size)
    jobs = [job(str(i), length) for i, length in enumerate(lengths)]
    for each in jobs:
        prefill.add(each)
    reached = {each.key: 0 for each in jobs}
    while computed := compute(prefill):
        assert sum(stop - start for _, start, stop in computed) <= chunk_size
        for each, start, stop in computed:
            assert start == reached[each.key]
            reached[each.key] = stop
            if not each.remaining:
                assert each.cache is not None
                rows = each.cache.rows(0, stop)
                assert prefill.pool.kv[1][rows][:, 0].tolist() == list(range(stop))
                prefill.release(each)
    assert reached == {each.key: each.num_tokens for each in jobs}
    assert prefill.pool.free_pages == prefill.pool.num_pages


@pytest.mark.parametrize(("tokens", "fits"), [(32, True), (33, False)])
def test_what_can_never_fit_is_known(tokens: int, fits: bool) -> None:
    prefill = chunked(num_pages=8, page_size=4)
    assert prefill.fits(tokens) is fits
