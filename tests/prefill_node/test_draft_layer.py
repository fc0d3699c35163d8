"""A prefill node that drafts computes, sends, caches and reads the draft layer's KV as that of any layer."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from control.messages import FetchDone
from kvcache.page_cache import PageCache
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.loader import load_model
from model.passes import PrefillChunk
from model.shard import Shard
from model.sparse_model import SparseModel
from model.split import SplitModel
from model.tiny import write_tiny_checkpoint
from service.checkpoint import identity_of
from tests.prefill_node.fetching import FIRST, LENT, PREFIX, SENT_TO, Fetching
from tests.prefill_node.sending import CPU
from tests.prefill_node.world import LiveWorld, ThreadExchange, live
from transfer.planner import expand_extents

PAGE_SIZE, PAGES = 16, 48
LAST = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SparseModel:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path, "deepseek_v32", seed=1, layers=2, index_topk=32)
    return load_model(path, torch.float32, CPU, drafts=True)


def kv_of(model: SparseModel, tokens: list[int], last_token: int = LAST) -> list[torch.Tensor]:
    """Of all positions in all buffers, computed in one pass."""
    pages = np.arange(-(-len(tokens) // PAGE_SIZE))
    pool = PagedKVPool(model.spec.kv_layout, len(pages), PAGE_SIZE, CPU)
    sequence = PagedSequence(pool, pages)
    model.prefill([PrefillChunk.of(torch.tensor([*tokens, last_token]), 0, len(tokens), sequence)])
    return [buffer[sequence.rows(0, len(tokens))] for buffer in (*pool.kv, *pool.index_keys)]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.view(torch.float32), expected.view(torch.float32), rtol=0, atol=1e-4)


def drafting(model: SparseModel, world_size: int) -> dict[str, Any]:
    """How a world is made whose ranks compute with a model."""

    def of_rank(rank: int, exchange: ThreadExchange) -> SparseModel:
        if world_size == 1:
            return model
        gather = partial(exchange.gather, rank)
        return SplitModel(model.network, model.spec, model._backend, Shard(rank, world_size), gather)

    pool = PagedKVPool(model.spec.kv_layout, PAGES, PAGE_SIZE, CPU)
    return {
        "cache": PageCache(pool, True),
        "world_size": world_size,
        "new_model": of_rank,
        "identity": identity_of(model.spec),
    }


@pytest.fixture(params=[1, 2])
def node(model: SparseModel, request: pytest.FixtureRequest) -> Iterator[LiveWorld]:
    yield from live(LiveWorld(**drafting(model, request.param)))


def sent(node: LiveWorld, tokens: list[int], last_token: int = LAST) -> list[torch.Tensor]:
    """What arrives at the decode node of a prompt."""
    node.slots.wipe()
    node.done(attempt := node.ask(tokens, last_token=last_token))
    node.release(attempt)
    return [layer[: len(tokens)].clone() for layer in node.slots.layers]


def test_all_layers_arrive_as_one_pass_computes_them(node: LiveWorld, model: SparseModel) -> None:
    for found, expected in zip(sent(node, FIRST[:90]), kv_of(model, FIRST[:90]), strict=True):
        assert_close(found, expected)


def test_the_last_token_decides_the_last_entry_of_the_draft_layer(node: LiveWorld, model: SparseModel) -> None:
    one, other = sent(node, FIRST[:40]), sent(node, FIRST[:40], last_token=LAST + 1)
    expected = kv_of(model, FIRST[:40], LAST + 1)
    draft_items = model.spec.draft_layer or 0
    for buffer, (before, after) in enumerate(zip(one, other, strict=True)):
        assert_close(after, expected[buffer])
        differ = (before != after).any(-1).nonzero().flatten().tolist()
        assert differ == ([39] if buffer in (draft_items, len(one) - 1) else [])


def test_the_end_of_a_cached_prefix_keeps_the_entry_of_the_first_prompt(node: LiveWorld, model: SparseModel) -> None:
    first, second = FIRST[:80], [*FIRST[:64], *FIRST[100:130]]
    sent(node, first)
    found, before, after = sent(node, second), kv_of(model, first), kv_of(model, second)
    for layer, shared, own in zip(found, before, after, strict=True):
        assert_close(layer[:64], shared[:64])
        assert_close(layer[64:], own[64:])


class DraftFetching(Fetching):
    """Its decode node has the KV of a prefix that a pass over all of FIRST computes."""

    def __init__(self, expected: list[torch.Tensor], **of_model: Any) -> None:
        self.expected = expected
        super().__init__(**of_model)

    def lend(self) -> None:
        for layer, whole in zip(self.slots.layers, self.expected, strict=True):
            layer[expand_extents(LENT)] = whole[:PREFIX]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prefix_is_read_with_the_draft_layer(model: SparseModel, world_size: int) -> None:
    node = DraftFetching(kv_of(model, FIRST), **drafting(model, world_size))
    try:
        attempt = node.ask_and_grant()
        node.until(FetchDone, attempt)
        done = node.done(attempt)
        assert done.cached_tokens == PREFIX
        slots = expand_extents(SENT_TO)[: len(FIRST) - PREFIX]
        for layer, whole in zip(node.slots.layers, node.expected, strict=True):
            assert_close(layer[slots], whole[PREFIX:])
        node.release(attempt)
    finally:
        node.close()
