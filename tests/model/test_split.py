"""Processes that divide the tokens of a prefill store what one that computes all of them stores, each of them all."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from model_caches import PagedPool, PagedRequest

from model.passes import PrefillChunk
from model.shard import Shard
from model.sparse_model import SparseModel
from model.split import SplitModel

T = TypeVar("T")
PROMPTS = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (151, 2, 41)]
STEPS = [[(0, 0, 90)], [(0, 90, 150), (1, 0, 1), (2, 0, 30)], [(2, 30, 31)], [(2, 31, 40)]]
"""Chunks of each step: prompt, start and stop. One has fewer tokens than there are ranks."""


class Meeting:
    """What threads gather from each other, in the order of their ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._rows: list[torch.Tensor] = [torch.empty(0)] * size

    def gather_of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def gather(rows: torch.Tensor) -> torch.Tensor:
            self._rows[rank] = rows
            self._barrier.wait()
            assert len({len(other) for other in self._rows}) == 1, "collectives need equal numbers"
            gathered = torch.cat(self._rows)
            self._barrier.wait()
            return gathered

        return gather


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
    return [model.prefill_hidden(chunks, lambda _: None) for chunks in steps_of(model)[1]]


def in_threads(model: SparseModel, size: int, work: Callable[[SparseModel, int], T]) -> list[T]:
    """What each process of a group computes with its part of the model. They are threads."""
    meeting = Meeting(size)

    def part(rank: int) -> T:
        gather = meeting.gather_of(rank)
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
