"""Tells gateways which blocks a node's prefix cache has, so that requests are routed to their prefix."""

from collections import deque
from collections.abc import Callable

import numpy as np

from base.block_hashes import BlockHashes
from control.membership import Membership
from control.messages import MAX_CACHE_BLOCKS, CacheUpdate

_EVERY_S = 0.1
"""Changes are collected for this long: less than until the next turn of a conversation."""
_PATIENCE_S = 2.5
"""A gateway that has not acknowledged an update by then, two heartbeats, has missed one."""


class CacheReports:
    """Collects which blocks are stored and removed, and sends them to gateways that want to know. One loop calls it.

    Each update is sent once. Gateways acknowledge updates with heartbeats. A gateway that misses one gets the whole
    cache, or as much of it as fits one message.
    """

    def __init__(self, gateways: Membership, newest: Callable[[int], BlockHashes]) -> None:
        """newest: hashes of at most that many cached blocks, the last used first."""
        self._gateways = gateways
        self._newest = newest
        self._changes: dict[int, bool] = {}
        """By hash, whether the block is there now. What was used last comes last."""
        self._serial = 0
        self._sent: deque[tuple[float, int]] = deque()
        """When each update was sent that a gateway may not have acknowledged yet."""
        self._due = 0
        """Every gateway should have acknowledged this update by now."""
        self._whole_at: dict[str, float] = {}
        """When each gateway was last sent the whole cache."""
        self._next_at = 0.0

    def stored(self, hashes: BlockHashes) -> None:
        """Note blocks of one prompt, uint64 [blocks] in their order, that came into the cache."""
        self._note(hashes, True)

    def removed(self, hashes: BlockHashes) -> None:
        """Note blocks, uint64 [blocks], that left the cache."""
        self._note(hashes, False)

    def send(self, now: float) -> None:
        """Send what is due. Call it in every turn of the loop."""
        if now < self._next_at:
            return
        self._next_at = now + _EVERY_S
        serials = self._gateways.cache_serials()
        if self._changes:
            self._serial += 1
            self._sent.append((now, self._serial))
            self._gateways.tell(serials, self._changed())
            self._changes = {}
        while self._sent and self._sent[0][0] <= now - _PATIENCE_S:
            self._due = self._sent.popleft()[1]
        self._whole_at = {address: at for address, at in self._whole_at.items() if at > now - _PATIENCE_S}
        behind = [name for name, serial in serials.items() if serial < self._due and name not in self._whole_at]
        if behind:
            newest = self._newest(MAX_CACHE_BLOCKS)
            self._gateways.tell(behind, CacheUpdate.of(self._serial, newest, newest[:0], whole=True))
            self._whole_at |= dict.fromkeys(behind, now)

    def _note(self, hashes: BlockHashes, present: bool) -> None:
        for name in hashes[::-1].tolist():
            self._changes.pop(name, None)
            self._changes[name] = present

    def _changed(self) -> CacheUpdate:
        """Changes that do not fit are left out: what a gateway does not know costs a hit."""
        newest_first = list(reversed(self._changes.items()))
        gained = [name for name, present in newest_first if present][:MAX_CACHE_BLOCKS]
        lost = [name for name, present in newest_first if not present][:MAX_CACHE_BLOCKS]
        return CacheUpdate.of(self._serial, np.array(gained, dtype=np.uint64), np.array(lost, dtype=np.uint64))
