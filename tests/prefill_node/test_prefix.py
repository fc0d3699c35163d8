"""A prefill node computes what nobody computed before and sends what was asked for, whatever of it is cached."""

import random
from collections.abc import Iterator

import pytest

from control.messages import Peer, PrefillFailed, Quiesced
from tests.prefill_node.world import LiveWorld, live, new_cache

FIRST = [(7 * i + i // 10) % 100 for i in range(160)]


OTHER = Peer(role="decode", address="127.0.0.1:10", boot_id="other")
"""What goes to one decode node goes there in one order."""


def sharing(tokens: list[int], shared: int, length: int) -> list[int]:
    """A prompt that begins with exactly so many of these tokens."""
    return [*tokens[:shared], *((token + 1) % 100 for token in tokens[shared:length])]


@pytest.fixture
def node() -> Iterator[LiveWorld]:
    yield from live(LiveWorld(new_cache()))


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("chunk_size", [24, 512])
def test_what_is_cached_is_sent_and_not_computed(page_size: int, chunk_size: int) -> None:
    node = LiveWorld(new_cache(1024 // page_size, page_size), chunk_size)
    node.run(FIRST[:128])
    computed, cached_tokens = 128, 0
    for shared in (0, 1, 63, 64, 65, 127, 128):
        for length, starts in ((128, (0, 63, 64, 127)), (150, (1, 65))):
            tokens = sharing(FIRST, shared, length)
            for start in starts:
                expected = shared // 64 * 64 if page_size != 128 else 0
                done = node.run(tokens, start)
                assert done.cached_tokens == expected
                computed += length - expected
                cached_tokens += expected
                assert node.model.tokens == computed
                node.cache.check_idle()
                # Only the first prompt is in the cache.
                if node.cache.prefixes is not None:
                    node.cache.prefixes.clear()
                node.run(FIRST[:128])
                computed += 128
    assert node.metric("prompt_tokens_total") == computed
    assert node.metric("prefix_cache_hits_total", side="prefill") == cached_tokens
    assert node.metric("prefix_cache_queries_total", side="prefill") == computed + cached_tokens
    node.close()


def test_a_prompt_that_is_cached_whole_is_only_sent(node: LiveWorld) -> None:
    node.run(FIRST[:128])
    passes = len(node.model.computed)
    done = node.run(FIRST[:128], start=5)
    assert len(node.model.computed) == passes
    assert (done.cached_tokens, done.chunks) == (128, 3)
    assert node.metric("prefill_pages", state="cached") == 8
    assert node.metric("prefill_pages", state="used") == 0


def test_cached_positions_are_sent_while_another_prompt_computes(node: LiveWorld) -> None:
    node.run(FIRST[:128])
    slow = node.ask(sharing(FIRST, 0, 32))
    node.model.before_pass = lambda: node.hold.wait(10)
    node.tell()
    node.done(node.ask(FIRST[:128], decode=OTHER))
    assert node.planner.progress((slow,)).current_pass is not None
    node.hold.set()
    node.done(slow)


def test_a_prompt_that_waits_for_the_same_one_computes_nothing_of_it_again(node: LiveWorld) -> None:
    first, second = node.ask(FIRST[:130]), node.ask(FIRST[:140])
    assert node.done(first).cached_tokens == 0
    assert node.done(second).cached_tokens == 128
    assert node.model.tokens == 130 + 12


def test_tokens_that_are_queued_are_those_that_have_to_be_computed(node: LiveWorld) -> None:
    node.run(FIRST[:128])
    node.ask(FIRST[:130])
    assert node.prefill.queued_tokens == 2
    node.ask(sharing(FIRST, 64, 100))
    assert node.prefill.queued_tokens == node.metric("prompt_tokens_waiting") == 2 + 36


def test_salts_share_nothing(node: LiveWorld) -> None:
    for salt, expected in (("a", 0), ("b", 0), ("", 0), ("a", 64), ("b", 64)):
        assert node.run(FIRST[:100], salt=salt).cached_tokens == expected
    assert node.metric("prefix_cache_hits_total", side="prefill") == 128


def test_what_an_aborted_prompt_has_computed_stays(node: LiveWorld) -> None:
    attempt = node.ask(FIRST[:128])
    node.until_computed(attempt, 64)
    node.stop(attempt)
    node.until(Quiesced, attempt)
    computed = node.model.tokens
    assert 64 <= computed <= 128
    node.cache.check_idle()
    assert node.run(FIRST[:128]).cached_tokens == computed // 64 * 64


def test_nothing_of_a_pass_that_failed_is_cached() -> None:
    node = LiveWorld(new_cache(), chunk_size=64)
    attempt = node.ask(FIRST[:160])
    node.until_computed(attempt, 64)
    node.model.error = MemoryError("out of memory")
    node.until(PrefillFailed, attempt)
    node.turn_until(lambda: not node.held)
    node.cache.check_idle()
    computed = node.model.tokens
    done = node.run(FIRST[:160])
    assert done.cached_tokens == (computed - 1) // 64 * 64
    node.close()


def test_a_node_with_room_for_one_prompt_gives_up_what_it_cached() -> None:
    rng = random.Random(5)
    node = LiveWorld(new_cache(num_pages=18, page_size=16), chunk_size=40)
    for _ in range(40):
        family = [rng.randrange(3)] * 64 + [rng.randrange(2)] * 64 + FIRST
        tokens = family[: rng.randrange(1, 288)]
        before = node.model.tokens
        done = node.run(tokens, rng.randrange(len(tokens)))
        assert node.model.tokens - before == len(tokens) - done.cached_tokens
        several = [(node.ask(family[: rng.randrange(1, 288)]), rng.random() < 0.3) for _ in range(4)]
        for attempt, is_aborted in several:
            if is_aborted and node.stop(attempt):
                node.until(Quiesced, attempt)
            else:
                node.done(attempt)
                node.release(attempt)
        node.cache.check_idle()
        node.prefixes.check_integrity()
    assert node.metric("prefix_cache_hits_total", side="prefill") > 0
    node.close()


@pytest.mark.parametrize("start", [0, 1, 31, 32, 33, 64, 95, 96, 99])
def test_positions_from_the_start_on_are_sent_and_all_are_computed(node: LiveWorld, start: int) -> None:
    """Also where whole chunks of 32 lie before it: they send nothing, and nothing is said of them."""
    done = node.run(FIRST[:100], start)
    assert node.model.tokens == 100
    assert done.chunks == 3 - min(start, 96) // 32
    node.cache.check_idle()
