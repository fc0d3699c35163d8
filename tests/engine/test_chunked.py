"""Prompts are computed in chunks, first come, first served, and every page comes back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.chunked import ChunkedPrefill, PrefillJob
from engine.paged_pool import PagedKVPool
from engine.sampling import Sampled, SamplingParams
from tests.prefill_node.fakes import LAYOUT, FakeModel

CPU = torch.device("cpu")


def chunked(num_pages: int = 8, page_size: int = 4, chunk_size: int = 6) -> tuple[ChunkedPrefill[str], FakeModel]:
    model = FakeModel()
    pool = PagedKVPool(LAYOUT, num_pages, page_size, CPU)
    return ChunkedPrefill(model, pool, chunk_size), model  # type: ignore[arg-type]


def job(key: str, length: int) -> PrefillJob[str]:
    return PrefillJob(key, torch.arange(length), SamplingParams(temperature=0))


def test_a_chunk_is_shared_by_several_requests() -> None:
    prefill, model = chunked(chunk_size=6)
    prefill.add(job("a", 4))
    prefill.add(job("b", 5))
    first = prefill.step()
    assert [(c.job.key, c.start, c.stop, c.token is not None) for c in first] == [
        ("a", 0, 4, True),
        ("b", 0, 2, False),
    ]
    second = prefill.step()
    assert [(c.job.key, c.start, c.stop, c.token is not None) for c in second] == [("b", 2, 5, True)]
    assert second[0].token == Sampled(7)
    assert model.calls == [[(0, 4), (0, 2)], [(2, 3)]]


def test_a_started_prompt_has_its_pages_to_the_end() -> None:
    """No two prompts can each hold half of what they need."""
    prefill, _ = chunked(num_pages=3, page_size=4)
    prefill.add(job("a", 8))
    prefill.add(job("b", 8))
    prefill.step()
    assert prefill.pool.free_pages == 1
    done = prefill.step()
    assert [c.job.key for c in done] == ["a"]
    assert prefill.step() == []
    prefill.release(done[0].job)
    assert [c.job.key for c in prefill.step()] == ["b"]


def test_a_forgotten_job_keeps_its_pages_until_it_is_released() -> None:
    """A write from them may be in flight."""
    prefill, _ = chunked()
    a = job("a", 20)
    prefill.add(a)
    prefill.step()
    prefill.forget(a)
    assert prefill.step() == []
    assert prefill.pool.free_pages == 8 - 5
    prefill.release(a)
    prefill.release(a)
    assert prefill.pool.free_pages == 8


@given(st.lists(st.integers(1, 24), max_size=6), st.integers(1, 9), st.sampled_from([1, 3, 4]))
def test_every_position_is_computed_once_and_lies_in_its_row(
    lengths: list[int], chunk_size: int, page_size: int
) -> None:
    prefill, _ = chunked(num_pages=24, page_size=page_size, chunk_size=chunk_size)
    jobs = [job(str(i), length) for i, length in enumerate(lengths)]
    for each in jobs:
        prefill.add(each)
    reached = {each.key: 0 for each in jobs}
    while computed := prefill.step():
        assert sum(c.stop - c.start for c in computed) <= chunk_size
        for c in computed:
            assert c.start == reached[c.job.key]
            reached[c.job.key] = c.stop
            if c.token is not None:
                assert c.job.cache is not None
                rows = c.job.cache.rows(0, c.stop)
                assert prefill.pool.kv[1][rows][:, 0].tolist() == list(range(c.stop))
                prefill.release(c.job)
    assert reached == {each.key: len(each.prompt_ids) for each in jobs}
    assert prefill.pool.free_pages == prefill.pool.num_pages


def test_buffers_are_one_per_layer_and_an_item_is_a_token() -> None:
    pool = PagedKVPool(LAYOUT, num_pages=3, page_size=4, device=CPU)
    info = pool.get_contiguous_buf_infos()
    assert info.item_lengths == (16, 16, 8)
    assert info.lengths == (12 * 16, 12 * 16, 12 * 8)
    assert info.ptrs[1] == pool.kv[1].data_ptr()
    assert info.num_items == 12


@pytest.mark.parametrize(("tokens", "fits"), [(32, True), (33, False)])
def test_what_can_never_fit_is_known(tokens: int, fits: bool) -> None:
    prefill, _ = chunked(num_pages=8, page_size=4)
    assert prefill.fits(tokens) is fits
