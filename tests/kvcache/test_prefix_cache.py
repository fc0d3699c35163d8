"""The prefix cache over a pool: what it owns, what requests own, and that nothing is lost or owned by nobody.

The plain model is a dictionary from a salt and a prefix to the slots of its last block, without nodes and counts.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from base.block_hashes import BLOCK_TOKENS
from kvcache.extents import Extent, HostSlots, SlotAccountingError, extents_of
from kvcache.format import DenseFormat
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout
from kvcache.prefix_cache import PrefixCache

VOCAB = 200_000
FORMAT = DenseFormat(torch.float32, item_dim=2, index_dim=2)
LAYOUT = KVLayout((0,), FORMAT.item_bytes, FORMAT.index_key_bytes)


def new_pool(slots: int) -> tuple[HostKVPool, PrefixCache]:
    pool = HostKVPool(LAYOUT, slots, pin=False, prefix_cache=True)
    assert pool.prefixes is not None
    return pool, pool.prefixes


def prompt(*blocks: int, rest: int = 0) -> npt.NDArray[np.int32]:
    """A token for each block, 64 times, and `rest` more of another one."""
    return np.repeat(np.array([*blocks, VOCAB - 1], dtype=np.int32), [BLOCK_TOKENS] * len(blocks) + [rest])


def landed(pool: HostKVPool, tokens: npt.NDArray[np.int32], salt: str = "") -> HostSlots:
    """What a request owns whose prompt has landed."""
    assert pool.prefixes is not None
    prefix = pool.prefixes.hold(tokens, salt)
    more = pool.allocate(len(tokens) - len(prefix))
    assert more is not None
    return pool.prefixes.share(tokens, prefix.extend(more.extents), salt)


def as_full_as_at_start(pool: HostKVPool) -> bool:
    """Before and after the cache is cleared."""
    assert pool.prefixes is not None
    assert pool.used == 0
    pool.prefixes.check_integrity()
    pool.check_integrity()
    pool.prefixes.clear()
    return pool.free == pool.num_slots and pool.cached == pool.prefixes.blocks.blocks == 0


def test_two_that_compute_the_same_keep_it_once() -> None:
    pool, cache = new_pool(1000)
    tokens = prompt(1, 2, rest=5)
    first, second = pool.allocate(len(tokens)), pool.allocate(len(tokens) + 64)
    assert first is not None
    assert second is not None
    first = cache.share(tokens, first)
    second = cache.share(tokens, second)
    assert second.slots()[:128].tolist() == first.slots()[:128].tolist()
    assert len(second) == len(tokens) + 64
    assert pool.num_slots - pool.free == 128 + 5 + 69
    pool.release(first)
    assert pool.num_slots - pool.free == 128 + 69
    pool.release(second)
    assert as_full_as_at_start(pool)


def test_a_request_keeps_its_own_slots_until_it_gives_them_back() -> None:
    pool, cache = new_pool(1000)
    tokens = prompt(1, 2)
    own = pool.allocate(128)
    assert own is not None
    pool.release(landed(pool, tokens))
    inserted = cache.insert(tokens, own)
    assert inserted == own
    assert pool.used == 128 + 128, "its slots, and the blocks that it holds"
    pool.release(inserted)
    assert pool.cached == 128
    assert as_full_as_at_start(pool)


def test_what_cannot_be_had_costs_the_cache_nothing() -> None:
    pool, cache = new_pool(256)
    pool.release(landed(pool, prompt(1, 2)))
    held = pool.allocate(100)
    assert held is not None
    assert pool.allocate(200) is None
    assert cache.blocks.blocks * BLOCK_TOKENS == 128
    pool.release(held)


def test_a_slot_that_the_cache_owns_and_somebody_freed_is_noticed() -> None:
    pool, cache = new_pool(256)
    slots = landed(pool, prompt(1))
    pool.release(slots)
    pool.release(HostSlots(slots.extents))
    with pytest.raises(SlotAccountingError, match="owned and free"):
        cache.check_integrity()


def test_the_blocks_of_a_prompt_are_freed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cache = new_pool(1000)
    pool.release(landed(pool, prompt(*range(10))))
    freed: list[Extent] = []
    monkeypatch.setattr(cache._slots, "_give", freed.append)
    monkeypatch.setattr(cache._slots, "free", 0)
    with pytest.raises(SlotAccountingError, match="0 are free now"):
        cache.evict(10 * BLOCK_TOKENS)
    assert [extent.length for extent in freed] == [10 * BLOCK_TOKENS], "a prompt of a million tokens has 15625 blocks"


def test_slots_are_joined_and_cut_in_their_order() -> None:
    slots = HostSlots(extents_of(np.array([7, 8]))).extend(extents_of(np.array([9, 3, 4, 12])))
    assert slots.extents == (Extent(7, 3), Extent(3, 2), Extent(12, 1))
    assert slots.slots().tolist() == [7, 8, 9, 3, 4, 12]
    assert slots.cut(4) == ((Extent(7, 3), Extent(3, 1)), (Extent(4, 1), Extent(12, 1)))
    assert slots.cut(0) == ((), slots.extents)
    assert slots.cut(6) == (slots.extents, ())
    assert extents_of(np.empty(0, dtype=np.int64)) == ()


@dataclass
class _Walk:
    """Requests that come, share, grow, end and are given up, in a pool that is too small for all of them.

    cached: slots of a block, by salt and the numbers of the blocks up to it. content: what was "computed" into a slot.
    """

    seed: int
    running: list[tuple[tuple[int, ...], str, HostSlots]] = field(default_factory=list)
    content: dict[int, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pool, self.cache = new_pool(self.random.choice((200, 700, 1500)))

    def step(self) -> None:
        if self.running and self.random.random() < 0.5:
            self.end(*self.running.pop(self.random.randrange(len(self.running))))
        else:
            self.begin()
        owned = {int(slot) for _, _, slots in self.running for slot in slots.slots()}
        assert self.pool.used == len(owned | self.held_by_cache(owned))
        self.cache.check_integrity()
        self.pool.check_integrity()

    def held_by_cache(self, owned: set[int]) -> set[int]:
        """Cached slots that cannot be given up, as a request holds their block: beside `owned` there are only those of
        blocks that a request had computed for itself, too."""
        held = [slots.held.values.ravel().tolist() for _, _, slots in self.running if slots.held is not None]
        return {slot for slots in held for slot in slots} - owned

    def begin(self) -> None:
        blocks = tuple(self.random.choice((1, 1, 2, 3)) for _ in range(self.random.randrange(5)))
        salt = self.random.choice(("", "", "tenant"))
        tokens = prompt(*blocks, rest=self.random.choice((0, 1, 63)))
        prefix = self.cache.hold(tokens, salt)
        for position, slot in enumerate(prefix.slots().tolist()):
            assert self.content[slot] == (salt, blocks[: position // BLOCK_TOKENS + 1], position), "another's KV"
        more = self.pool.allocate(len(tokens) - len(prefix))
        if more is None:
            self.pool.release(prefix)
            return
        slots = prefix.extend(more.extents)
        self.write(slots, blocks, salt, len(prefix))
        if self.random.random() < 0.2:
            # It is given up before it has landed.
            self.pool.release(prefix)
            self.pool.release(more)
            return
        if self.random.random() < 0.8:
            slots = self.cache.share(tokens, slots, salt)
        self.running.append((blocks, salt, slots))

    def end(self, blocks: tuple[int, ...], salt: str, slots: HostSlots) -> None:
        """It has generated some more, and is cached, or not."""
        before, generated = len(slots), tuple(self.random.choice((1, 2)) for _ in range(self.random.randrange(3)))
        has = len(slots) // BLOCK_TOKENS * BLOCK_TOKENS
        if len(blocks) * BLOCK_TOKENS == has == before and generated:
            grown = self.pool.extend(slots, len(generated) * BLOCK_TOKENS)
            if grown is not None:
                blocks, slots = blocks + generated, grown
                self.write(slots, blocks, salt, before)
        if self.random.random() < 0.8:
            slots = self.cache.insert(prompt(*blocks), slots, salt)
        self.pool.release(slots)

    def write(self, slots: HostSlots, blocks: tuple[int, ...], salt: str, start: int) -> None:
        for position, slot in list(enumerate(slots.slots().tolist()))[start:]:
            self.content[slot] = (salt, blocks[: position // BLOCK_TOKENS + 1], position)


@pytest.mark.parametrize("seed", range(8))
def test_requests_find_their_own_kv_and_no_slot_is_lost(seed: int) -> None:
    walk = _Walk(seed)
    for _ in range(120):
        walk.step()
    while walk.running:
        walk.end(*walk.running.pop())
    assert as_full_as_at_start(walk.pool)
