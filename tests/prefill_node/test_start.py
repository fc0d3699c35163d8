"""A prefill that begins to send at a position: exactly what the decode node lacks arrives."""

from collections.abc import Iterator

import pytest

from control.messages import Quiesced
from kvcache.page_cache import PageCache
from kvcache.paged_pool import PagedKVPool
from tests.prefill_node.fakes import LAYOUT
from tests.prefill_node.sending import CPU
from tests.prefill_node.world import LiveWorld, live

TOKENS = [7 * i % 100 for i in range(100)]


@pytest.fixture
def node() -> Iterator[LiveWorld]:
    yield from live(LiveWorld(PageCache(PagedKVPool(LAYOUT, num_pages=16, page_size=16, device=CPU))))


@pytest.mark.parametrize("start", [0, 1, 31, 32, 33, 64, 95, 96, 99])
def test_positions_from_the_start_on_are_sent_and_all_are_computed(node: LiveWorld, start: int) -> None:
    """Also where whole chunks of 32 lie before it: they send nothing, and nothing is said of them."""
    done = node.run(TOKENS, start)
    assert node.model.tokens == 100
    assert done.chunks == 3 - min(start, 96) // 32
    assert node.pool.free_pages == node.pool.num_pages


def test_a_request_stopped_while_nothing_is_sent_ends_with_its_pass(node: LiveWorld) -> None:
    attempt = node.ask(TOKENS, start=99)
    node.tell()
    assert node.held[attempt].has_begun
    assert node.stop(attempt)
    node.until(Quiesced, attempt)
    assert node.pool.free_pages == node.pool.num_pages
    assert not node.channel.posted
