"""Processes that divide a prefill store what one that computes all of it does, and a prefix may come meanwhile."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
import torch
from model_caches import PagedPool, PagedRequest

from model.passes import PrefillChunk
from model.shard import Shard
from model.sparse_model import SparseModel
from model.split import SplitModel
from tests.prefill_node.world import ThreadExchange

T = TypeVar("T")
PROMPTS = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (151, 2, 41)]
STEPS = [[(0, 0, 90)], [(0, 90, 150), (1, 0, 1), (2, 0, 30)], [(2, 30, 31)], [(2, 31, 40)]]
"""Chunks of each step: prompt, start and stop. One has fewer tokens than there are ranks."""


def steps_of(model: SparseModel) -> tuple[PagedPool, list[list[PrefillChunk]]]:
    """An empty pool, and the chunks of all steps, whose KV goes there."""
    pool = PagedPool(model.spec, num_pages=30, page_size=16)
    requests = [PagedRequest(pool, len(prompt)) for prompt in PROMPTS]
    return pool, [[PrefillChunk.of(PROMPTS[n], start, stop, requests[n]) for n, start, stop in step] for step in STEPS]


def computed_by(model: SparseModel, on_layer: Callable[[int], None] = lambda _: None) -> PagedPool:
    """The pool that a model has filled with all steps."""
    pool, steps = steps_of(model)
    for chunks in steps:
        model.prefill(chunks, on_layer)
    return pool


def hidden_of(model: SparseModel) -> list[torch.Tensor]:
    """Hidden states of the tokens of all steps."""
    return [model.prefill(chunks, kv_only=False) for chunks in steps_of(model)[1]]


def in_threads(model: SparseModel, size: int, work: Callable[[SparseModel, int], T]) -> list[T]:
    """What each process of a group computes with its part of the model. They are threads."""
    exchange = ThreadExchange(size)

    def part(rank: int) -> T:
        gather = partial(exchange.gather, rank)
        return work(SplitModel(model.network, model.spec, model._backend, Shard(rank, size), gather), rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(part, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_process_has_the_kv_of_all_tokens(drafting: SparseModel, size: int) -> None:
    expected = computed_by(drafting)
    layers: list[int] = []
    on_layer = [layers.append] + [lambda _: None] * (size - 1)
    pools = in_threads(drafting, size, lambda part, rank: computed_by(part, on_layer[rank]))
    assert layers == list(range(drafting.spec.num_layers)) * len(STEPS)
    for pool in pools:
        for mine, theirs in ((pool.kv, expected.kv), (pool.keys, expected.keys)):
            torch.testing.assert_close(
                mine.view(torch.float32), theirs.view(torch.float32), rtol=1e-4, atol=1e-4, equal_nan=True
            )


@pytest.mark.parametrize("size", [2, 3])
def test_every_process_has_the_hidden_states_of_all_tokens(drafting: SparseModel, size: int) -> None:
    """Log probabilities of prompts are computed from them."""
    expected = hidden_of(drafting)
    for found in in_threads(drafting, size, lambda part, rank: hidden_of(part)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


PROMPT = torch.randint(0, 256, (121,), generator=torch.Generator().manual_seed(7))
PREFIX, COMPUTED = 80, 120


def test_a_layer_of_the_prefix_is_read_after_on_layer_has_returned(drafting: SparseModel) -> None:
    """Rows that nothing was written to are NaN, so what is read too early is seen."""
    spec = drafting.spec
    there, here = (PagedPool(spec, num_pages=8, page_size=16) for _ in range(2))
    whole, late = PagedRequest(there, COMPUTED), PagedRequest(here, COMPUTED)
    for start, stop in ((0, PREFIX), (PREFIX, COMPUTED)):
        drafting.prefill([PrefillChunk.of(PROMPT, start, stop, whole)])
    rows = late.rows(0, PREFIX)
    assert torch.equal(rows, whole.rows(0, PREFIX))

    def bring(layer: int) -> None:
        here.kv[layer, rows] = there.kv[layer, rows]
        group = spec.index_layer_of[layer]
        if spec.index_layer_of.index(group) == layer:
            here.keys[group, rows] = there.keys[group, rows]

    drafting.prefill([PrefillChunk.of(PROMPT, PREFIX, COMPUTED, late)], bring)
    assert torch.equal(here.kv, there.kv)
    assert torch.equal(here.keys, there.keys)
