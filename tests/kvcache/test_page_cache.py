"""Pages are shared by prompts that begin alike, are never written while shared, and none is lost."""

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from base.block_hashes import BLOCK_TOKENS
from kvcache.page_cache import PageCache, PageLease
from kvcache.paged_pool import PagedKVPool
from tests.prefill_node.fakes import LAYOUT

CPU = torch.device("cpu")


def new_cache(num_pages: int = 12, page_size: int = 32) -> PageCache:
    return PageCache(PagedKVPool(LAYOUT, num_pages, page_size, CPU), is_on=True)


def tokens_of(names: str, rest: int = 0) -> npt.NDArray[np.int64]:
    """A block for each letter, which is its first token, and `rest` tokens more."""
    tokens = np.full(len(names) * BLOCK_TOKENS + rest, 5)
    tokens[: len(names) * BLOCK_TOKENS : BLOCK_TOKENS] = [ord(name) - ord("a") for name in names]
    return tokens


def lend(cache: PageCache, tokens: npt.NDArray[np.int64], salt: str = "") -> PageLease:
    lease = cache.lend(tokens, salt)
    assert lease is not None
    return lease


def fill(cache: PageCache, names: str, salt: str = "") -> PageLease:
    """A prompt that was computed and is over."""
    lease = lend(cache, tokens_of(names), salt)
    cache.insert(lease, len(lease.tokens))
    cache.give_back(lease)
    return lease


def test_a_prompt_evicts_only_as_much_as_it_lacks() -> None:
    cache = new_cache(num_pages=12, page_size=32)
    fill(cache, "abc")
    fill(cache, "de")
    assert (cache.pool.free_pages, cache.cached_pages) == (2, 10)
    lease = lend(cache, tokens_of("fg", rest=1))
    assert len(lease.pages) == 5
    assert cache.find(tokens_of("abc")) == 64, "its last blocks were the oldest"
    assert cache.find(tokens_of("de")) == 128
    assert lend(cache, tokens_of("def")).cached == 128
    assert cache.find(tokens_of("abc")) == 0
    assert cache.lend(tokens_of("abc")) is None, "all that is cached is in use"


def test_pages_that_are_no_parts_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 128 tokens"):
        new_cache(page_size=128)


@dataclass
class _Prompt:
    tokens: npt.NDArray[np.int64]
    salt: str
    lease: PageLease
    computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.computed = self.lease.cached

    def name(self, stop: int) -> tuple[str, bytes]:
        return self.salt, self.tokens[:stop].tobytes()


class _Walk:
    """Random prompts against a cache. `rows` is the pool's KV: each row names the tokens that it was computed from."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = self.random.choice((16, 32, 64))
        self.cache = new_cache(self.random.choice((8, 24, 60)), self.page_size)
        self.rows: dict[int, tuple[str, bytes]] = {}
        self.cached: dict[tuple[str, bytes], npt.NDArray[np.int64]] = {}
        """The tokens of each cached prefix."""
        self.prompts: list[_Prompt] = []

    def step(self) -> None:
        self.random.choice((self.begin, self.begin, self.look_again, self.compute, self.compute, self.end))()
        assert self.cache.prefixes is not None
        self.cache.prefixes.check_integrity()
        used = {int(page) for prompt in self.prompts for page in prompt.lease.pages}
        for prompt in self.prompts:
            assert len(set(prompt.lease.pages.tolist())) == len(prompt.lease.pages)
        pool = self.cache.pool
        assert pool.free_pages + self.cache.cached_pages <= pool.num_pages - len(used)

    def begin(self) -> None:
        names = "".join(self.random.choice("aaab") for _ in range(self.random.randrange(5)))
        tokens = tokens_of(names, rest=self.random.randrange(1, 70))
        salt = self.random.choice(("", "", "tenant"))
        longest = self.longest(tokens, salt)
        room = self.cache.pool.free_pages + self.cache.cached_pages
        lease = self.cache.lend(tokens, salt)
        if lease is None:
            assert room < -(-len(tokens) // self.page_size), "there was room"
            return
        assert lease.cached == longest
        assert len(lease.pages) == -(-len(tokens) // self.page_size)
        self.prompts.append(_Prompt(tokens, salt, lease))
        self.check_cached(self.prompts[-1])
        self.forget_evicted()

    def look_again(self) -> None:
        for prompt in self.prompts:
            if prompt.computed == prompt.lease.cached:
                longest = self.longest(prompt.tokens, prompt.salt)
                assert self.cache.extend(prompt.lease) == (longest > prompt.computed)
                prompt.computed = prompt.lease.cached
                assert prompt.computed == longest
                self.check_cached(prompt)

    def compute(self) -> None:
        if not self.prompts:
            return
        prompt = self.random.choice(self.prompts)
        stop = min(len(prompt.tokens), prompt.computed + self.random.randrange(1, 150))
        for position in range(prompt.computed, stop):
            page = int(prompt.lease.pages[position // self.page_size])
            assert self.cache.pool.slots._references[page] == 1, "a page is written that others read"
            self.rows[page * self.page_size + position % self.page_size] = prompt.name(position + 1)
        prompt.computed = stop
        self.cache.insert(prompt.lease, stop)
        for end in range(BLOCK_TOKENS, stop + 1, BLOCK_TOKENS):
            self.cached.setdefault(prompt.name(end), prompt.tokens[:end])

    def end(self) -> None:
        if self.prompts:
            self.cache.give_back(self.prompts.pop(self.random.randrange(len(self.prompts))).lease)

    def longest(self, tokens: npt.NDArray[np.int64], salt: str) -> int:
        end = 0
        while (salt, tokens[: end + BLOCK_TOKENS].tobytes()) in self.cached and end + BLOCK_TOKENS <= len(tokens):
            end += BLOCK_TOKENS
        return end

    def check_cached(self, prompt: _Prompt) -> None:
        for position in range(prompt.computed):
            page = int(prompt.lease.pages[position // self.page_size])
            assert self.rows[page * self.page_size + position % self.page_size] == prompt.name(position + 1)

    def forget_evicted(self) -> None:
        """Which blocks a prompt displaced, `tests/kvcache/test_block_cache.py` holds; here, that none is in use."""
        held = [(prompt, prompt.lease.slots.held_blocks) for prompt in self.prompts]
        in_use = {prompt.name(64 * end) for prompt, blocks in held for end in range(1, blocks + 1)}
        for name, tokens in list(self.cached.items()):
            if self.cache.find(tokens, name[0]) < len(tokens):
                assert name not in in_use
                del self.cached[name]

    def over(self) -> None:
        while self.prompts:
            self.end()
        self.cache.check_idle()
        assert self.cache.prefixes is not None
        self.cache.prefixes.clear()
        assert self.cache.pool.free_pages == self.cache.pool.num_pages


@pytest.mark.parametrize("seed", range(12))
def test_no_page_is_lost_or_written_while_shared(seed: int) -> None:
    walk = _Walk(seed)
    for _ in range(150):
        walk.step()
    walk.over()
