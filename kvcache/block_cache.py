"""Which blocks of tokens have KV in a pool, and which of them are evicted first.

A *block* is 64 tokens of a prompt, together with all tokens before them. It is known by a hash (`base.block_hashes`)
that covers its tokens, the hash of the block before it (its *parent*) and the prompt's salt. A hash only finds a
candidate: a hit takes equal tokens, the same parent and, for a first block, the same salt. Of two blocks with one hash
the first is kept.

A block has *values*, which say where its KV is: 64 host slots on a decode node, pages on a prefill node. The cache owns
them from `insert` until `evict` returns them. It reads no KV and frees nothing: the caller inserts only verified KV.

**Holders.** `hold` and `insert` count one holder for each block of the prefix, until `release`. A held block is not
evicted. A holder of a block holds its parents, too.

**Eviction** is LRU over blocks without holders. `find` uses the blocks that it finds, and `release` those that it
leaves without a holder. Of one use, a block counts as older than its parent, so the oldest block of all has no child:
the order of vLLM, which frees the blocks of a request from the last to the first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS, BlockHasher, BlockHashes, StoredBlocks
from kvcache.extents import BlockValues, HeldBlocks, SlotAccountingError

PromptIds = npt.NDArray[np.integer]
"""[n]: a prompt."""
BLOCK_BYTES = 700 + 4 * BLOCK_TOKENS
"""Main memory that a decode node's cache takes for a block, at most: its tokens, tables and slot numbers."""
_NO_PARENT = -1


class BlockEvents(Protocol):
    """Hears which blocks a cache has."""

    def stored(self, blocks: StoredBlocks) -> None:
        """Blocks of one prompt came into the cache. The caller may change the tokens later."""
        ...

    def removed(self, hashes: BlockHashes) -> None:
        """Blocks, uint64 [blocks], left the cache."""
        ...


class BlockCache:
    """Up to `capacity` blocks with `width` values each. One thread owns it.

    insertions: how often blocks were added. Until that changes, a prefix that was not found is not there.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity = capacity
        self.width = width
        self.insertions = 0
        self._hasher = BlockHasher(seed=0)
        self._events: list[BlockEvents] = []
        self._number_of: dict[int, int] = {}
        """By hash."""
        self._salt_of: dict[int, str] = {}
        """Of first blocks, by number."""
        # Zeroed memory costs nothing before it is used.
        self._hashes: BlockHashes = np.zeros(capacity, dtype=np.uint64)
        self._tokens = np.zeros((capacity, BLOCK_TOKENS), dtype=np.int32)
        self._parents = np.zeros(capacity, dtype=np.int32)
        self._values: BlockValues = np.zeros((capacity, width), dtype=np.int32)
        self._holders = np.zeros(capacity, dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Blocks without holders, the oldest first."""

    @property
    def blocks(self) -> int:
        return len(self._number_of)

    @property
    def evictable_blocks(self) -> int:
        """Blocks without holders. Their values count as free."""
        return len(self._evictable)

    def report_to(self, events: BlockEvents, seed: int) -> None:
        """From now on say what comes and goes, with hashes under `seed`, the same for all who hear it.

        To be called while nothing is cached.
        """
        assert not self.blocks, "hashes of cached blocks do not change"
        self._events.append(events)
        self._hasher = BlockHasher(seed)

    def find(self, tokens: PromptIds, salt: str = "") -> int:
        """How many tokens at the beginning of a prompt, ids [n], are cached."""
        numbers = self._match(tokens, salt, self._hasher(tokens, salt))
        for number in reversed(numbers.tolist()):
            if number in self._evictable:
                self._evictable.move_to_end(number)
        return len(numbers) * BLOCK_TOKENS

    def hold(self, tokens: PromptIds, salt: str = "") -> HeldBlocks:
        """Hold the longest cached prefix of a prompt, ids [n]."""
        return self._hold(self._match(tokens, salt, self._hasher(tokens, salt)))

    def release(self, held: HeldBlocks) -> None:
        """Undo one `hold` or `insert`. Raises SlotAccountingError if nobody holds the blocks."""
        numbers = held.numbers
        if not self._holders[numbers].all():
            raise SlotAccountingError(f"{len(held)} blocks are released, but nobody holds them")
        self._holders[numbers] -= 1
        for number in reversed(numbers[self._holders[numbers] == 0].tolist()):
            self._evictable[number] = None

    def insert(
        self, tokens: PromptIds, values: npt.NDArray[np.integer], salt: str = "", hashes: BlockHashes | None = None
    ) -> tuple[HeldBlocks, int]:
        """Add the whole blocks of a prompt, and hold them. Returns them, and how many were cached before.

        tokens: ids [n]. values: [n // 64, width], each in the range of int32. The cache owns those of the blocks that
        it lacked; blocks that it had keep theirs. hashes: of the blocks, if the caller has them. Raises ValueError for
        values of another shape, or if there is no room: the caller has to evict before.
        """
        if hashes is None:
            hashes = self._hasher(tokens, salt)
        if values.shape != (len(hashes), self.width):
            raise ValueError(
                f"values of shape {values.shape} for {len(tokens)} tokens, expected {(len(hashes), self.width)}"
            )
        numbers = self._match(tokens, salt, hashes)
        present = len(numbers)
        if len(hashes) - present > len(self._free):
            raise ValueError(
                f"{len(hashes) - present} blocks are inserted, the prefix cache has room for {len(self._free)}"
            )
        stop = present + self._add_names(hashes[present:].tolist())
        if stop > present:
            added = np.array([self._number_of[name] for name in hashes[present:stop].tolist()], dtype=np.int64)
            numbers = np.concatenate([numbers, added])
            self._hashes[added] = hashes[present:stop]
            self._tokens[added] = _blocks(tokens, stop)[present:]
            self._values[added] = values[present:stop]
            self._parents[added] = _parents(numbers)[present:]
            if not present:
                self._salt_of[int(added[0])] = salt
            self.insertions += 1
            for events in self._events:
                parent = int(hashes[present - 1]) if present else None
                own = tokens[present * BLOCK_TOKENS : stop * BLOCK_TOKENS]
                events.stored(StoredBlocks(hashes[present:stop], own, parent, salt))
        return self._hold(numbers), present

    def evict(self, blocks: int) -> BlockValues:
        """Evict the `blocks` oldest blocks without holders, or all of them. Returns their values, in that order."""
        numbers = [self._evictable.popitem(last=False)[0] for _ in range(min(blocks, len(self._evictable)))]
        gone = np.array(numbers, dtype=np.int64)
        hashes = self._hashes[gone]
        for number, name in zip(numbers, hashes.tolist(), strict=True):
            del self._number_of[name]
            self._salt_of.pop(number, None)
        self._free += reversed(numbers)
        for events in self._events if numbers else ():
            events.removed(hashes)
        return self._values[gone]

    def newest(self, limit: int) -> BlockHashes:
        """Hashes of held blocks, and then of those that were used last, at most `limit`: uint64 [n]."""
        held = np.flatnonzero(self._holders)[:limit].tolist()
        used = [number for number, _ in zip(reversed(self._evictable), range(limit - len(held)), strict=False)]
        return self._hashes[np.array(held + used, dtype=np.int64)]

    def all_values(self) -> BlockValues:
        """The values of every block, in no order: int32 [blocks, width]."""
        return self._values[list(self._number_of.values())]

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless the tables agree with each other and no values are owned twice."""
        used = sorted(self._number_of.values())
        held = np.flatnonzero(self._holders).tolist()
        values = self._values[used]
        age = {number: at for at, number in enumerate(self._evictable)}
        parents = {number: int(self._parents[number]) for number in used}
        firsts = {number for number, parent in parents.items() if parent == _NO_PARENT}
        for holds, problem in (
            (sorted(used + self._free) == list(range(self.capacity)), "blocks are lost or used twice"),
            (sorted(held + list(age)) == used, "blocks are neither held nor evictable, or both"),
            (all(self._hashes[n] == name for name, n in self._number_of.items()), "hashes and numbers differ"),
            (firsts == self._salt_of.keys(), "salts are lost, or of other blocks"),
            (parents.keys() >= set(parents.values()) - {_NO_PARENT}, "a parent is gone"),
            (all(age[n] < age.get(parents[n], self.capacity) for n in age), "a parent is older than its child"),
            (len(np.unique(values)) == values.size, "values are owned twice"),
        ):
            if not holds:
                raise SlotAccountingError(f"prefix cache: {problem}")

    def _match(self, tokens: PromptIds, salt: str, hashes: BlockHashes) -> npt.NDArray[np.int64]:
        """Numbers of the blocks of the longest cached prefix: int64 [blocks]."""
        found = []
        for name in hashes.tolist():
            number = self._number_of.get(name)
            if number is None:
                break
            found.append(number)
        numbers = np.array(found, dtype=np.int64)
        if not found or self._salt_of.get(found[0]) != salt:
            return numbers[:0]
        same = (self._tokens[numbers] == _blocks(tokens, len(found))).all(axis=1)
        same &= self._parents[numbers] == _parents(numbers)
        return numbers if same.all() else numbers[: int(same.argmin())]

    def _add_names(self, names: Sequence[int]) -> int:
        """Give numbers to new blocks of a prompt, up to one whose hash another block has. Returns how many."""
        for at, name in enumerate(names):
            if name in self._number_of:
                return at
            self._number_of[name] = self._free.pop()
        return len(names)

    def _hold(self, numbers: npt.NDArray[np.int64]) -> HeldBlocks:
        for number in numbers.tolist():
            self._evictable.pop(number, None)
        self._holders[numbers] += 1
        return HeldBlocks(numbers, self._values[numbers])


def _blocks(tokens: PromptIds, blocks: int) -> PromptIds:
    """The first blocks of a prompt: [blocks, 64]."""
    return tokens[: blocks * BLOCK_TOKENS].reshape(blocks, BLOCK_TOKENS)


def _parents(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The parent of each block of a prefix."""
    return np.concatenate(([_NO_PARENT], numbers[:-1]))
