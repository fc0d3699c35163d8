"""What nodes tell gateways of their prefix caches, over a way that loses a part of it."""

import random
from collections.abc import Iterable

import numpy as np

from base.block_hashes import BLOCK_TOKENS, BlockHashes, StoredBlocks, block_hashes
from control.membership import CacheReports
from control.messages import CacheUpdate
from gateway.prefix_routing import PrefixIndex
from kvcache.block_cache import BlockCache

HEARTBEAT_S = 1.0


class LossyGateways:
    """Gateways by address, each with an index. Heartbeats bring back what each has acknowledged."""

    def __init__(self, addresses: Iterable[str], loses: float = 0.0) -> None:
        self.indexes = {address: PrefixIndex(1000) for address in addresses}
        self.sent: list[tuple[str, CacheUpdate]] = []
        self.loses = loses
        self._acknowledged = dict.fromkeys(self.indexes, 0)
        self._random = random.Random(0)

    def heartbeat(self) -> None:
        self._acknowledged = {address: index.serial("node") for address, index in self.indexes.items()}

    def restart(self, address: str) -> None:
        self.indexes[address] = PrefixIndex(1000)

    def cache_serials(self) -> dict[str, int]:
        return self._acknowledged

    def tell(self, addresses: Iterable[str], message: CacheUpdate) -> None:
        for address in addresses:
            self.sent.append((address, message))
            if self._random.random() >= self.loses:
                self.indexes[address].apply("node", message)


def prompt(number: int, blocks: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.full(64 * blocks, number, dtype=np.int32)


def stored(number: int, blocks: int) -> StoredBlocks:
    return StoredBlocks(block_hashes(prompt(number, blocks)), prompt(number, blocks), None, "")


def nothing(limit: int) -> BlockHashes:
    return np.empty(0, dtype=np.uint64)


def test_changes_are_collected_and_sent_once() -> None:
    gateways = LossyGateways(["one", "two"])
    reports = CacheReports(gateways, nothing)
    hashes = stored(1, 4).hashes
    reports.send(0.0)
    reports.stored(stored(1, 4))
    reports.removed(hashes[3:])
    reports.stored(stored(2, 2))
    reports.send(0.01)
    assert not gateways.sent, "too early"
    reports.send(1.0)
    reports.send(2.0)
    assert [address for address, _ in gateways.sent] == ["one", "two"]
    update = gateways.sent[0][1]
    assert update.serial == 1
    assert update.lost_hashes.tolist() == hashes[3:].tolist()
    assert update.gained_hashes.tolist() == [*block_hashes(prompt(2, 2)).tolist(), *hashes[:3].tolist()], "newest first"


def test_a_gateway_that_acknowledges_late_gets_the_whole_cache() -> None:
    gateways = LossyGateways(["one"])
    hashes = stored(1, 3).hashes
    reports = CacheReports(gateways, lambda limit: hashes[:limit])
    reports.stored(stored(1, 3))
    for tenth in range(80):
        reports.send(tenth / 10)
    assert [(update.serial, update.whole) for _, update in gateways.sent] == [(1, False), *3 * [(1, True)]]
    gateways.heartbeat()
    for tenth in range(80, 160):
        reports.send(tenth / 10)
    assert len(gateways.sent) == 4


def test_gateways_follow_a_cache_over_losses_and_restarts() -> None:
    generator, cache = random.Random(1), BlockCache(40, 1)
    gateways = LossyGateways(["one", "two"], loses=0.3)
    reports = CacheReports(gateways, cache.newest)
    cache.report_to(reports, seed=0)
    now, slot = 0.0, 0

    def pass_time(seconds: float) -> None:
        nonlocal now
        for _ in range(int(seconds / 0.1)):
            now += 0.1
            if now % HEARTBEAT_S < 0.1:
                gateways.heartbeat()
            reports.send(now)

    for step in range(300):
        tokens = prompt(generator.randrange(12), generator.randrange(1, 12))
        blocks = len(tokens) // BLOCK_TOKENS
        missing = blocks - cache.find(tokens) // BLOCK_TOKENS
        cache.evict(missing - (cache.capacity - cache.blocks))
        slots = np.arange(slot, slot + blocks)[:, None]
        slot += blocks
        cache.release(cache.insert(tokens, slots)[0])
        pass_time(0.3)
        if step % 100 == 50:
            gateways.restart("two")
    gateways.loses = 0.0
    pass_time(10)
    for index in gateways.indexes.values():
        assert index.blocks("node") == cache.blocks
        for number in range(12):
            tokens = prompt(number, 12)
            assert index.matched(block_hashes(tokens))["node"] == cache.find(tokens)
