"""Which positions are in the hot buffer, and which of them a miss evicts.

State is kept per row (running request) and index layer; all layers of an index layer's group share it. A row's hot
buffer has H = `device_buffer_size` ordinary hot indices 0 .. H-1 and the extra one H for the newest token. A step gives
every row its newest position and up to H selected positions in top-k order (-1 = none).

**Short rows** (newest position < H): position p lives at hot index p, always. Everything is a hit; no state is read or
written. Residency is initialised to the first H positions, all resident, reference bits 0, hand 0, which is what a
short row has become when it turns long.

**Long rows**: the newest position is at hot index H. It is a hit. Its predecessor, which was there a step ago, is
simply no longer resident. Other selected positions are looked up:

1. *Hits* are protected for this step and get their reference bit set.
2. *Misses*: repeated positions count once, at their first place in top-k order. Let there be m of them.
3. *Victims* are found by CLOCK with reference bits (Corbató, "A Paging Experiment with the Multics System", 1968).
   The hot indices 0 .. H-1 are walked once around, starting at the hand and skipping protected ones. Those with bit 0
   are victims, in that order, until there are m; an empty hot index has bit 0. Those with bit 1 that are passed before
   the m-th victim lose the bit. If one revolution did not give m victims, a second one from the same starting point
   takes the rest, in order, from those that lost their bit in the first. What was filled in the first is not taken.
4. The i-th distinct miss takes the i-th victim, whose old position is no longer resident. Its bit is 0: a position
   has to be selected again to be spared by the hand, so what is selected once goes first. (With the bit set, as in the
   original, the hit rate was up to 4 points lower on traces that favour recent positions.)
5. The hand moves to just after the m-th victim. With m = 0 it stays and no bit is lost.

As hits and distinct misses together are at most H, victims always suffice. In parallel form the rank of a victim is a
prefix sum over the hot indices in clock order: among the unprotected with bit 0, or, after all of those, among the
unprotected with bit 1; the victims are the unprotected with rank < m.

Where a position is takes two tables that point at each other: position p is at hot index h if `hot_of[p]` is h and
`position_at[h]` is p (a sparse set: Briggs and Torczon, "An efficient representation for sparse sets", 1993). So the
big table, which has an entry for every position of the context, is never cleared: not for an eviction, which would be
another scattered write per miss, and not for a new request.
"""

from dataclasses import dataclass

import torch

from kvcache.extents import SlotAccountingError

MAX_DEVICE_BUFFER_SIZE = 2**15 - 1
"""The position table holds hot indices as int16: it is the biggest table, and int32 would double it. HiSparseConfig
refuses more."""


@dataclass(frozen=True)
class MissPlan:
    """Where every selected position is after a resolve, and what has to be copied for that to be true.

    hot: int64 [batch, k], hot index of each selected position, -1 for -1. miss_batch, miss_positions, miss_hot: int64
    [misses], the distinct misses by batch index and, within it, in top-k order. hits: selected entries that need no
    copy of their own, repeated misses included.
    """

    hot: torch.Tensor
    miss_batch: torch.Tensor
    miss_positions: torch.Tensor
    miss_hot: torch.Tensor
    hits: int

    @property
    def misses(self) -> int:
        return len(self.miss_batch)


class Residency:
    """The state of the replacement policy that the module describes.

    position_at: int32 [index_layers, rows, H], the position at a hot index, -1 if empty.
    hot_of: int16 [index_layers, rows, max_context], where a position was last; anything if it was never resident.
    referenced: bool [index_layers, rows, H]. hand: int32 [index_layers, rows].
    """

    def __init__(
        self, num_index_layers: int, max_requests: int, max_context: int, device_buffer_size: int, device: torch.device
    ) -> None:
        rows = (num_index_layers, max_requests)
        self.device_buffer_size = device_buffer_size
        self.max_context = max_context
        self.position_at = torch.full((*rows, device_buffer_size), -1, dtype=torch.int32, device=device)
        self.hot_of = torch.zeros((*rows, max_context), dtype=torch.int16, device=device)
        self.referenced = torch.zeros((*rows, device_buffer_size), dtype=torch.bool, device=device)
        self.hand = torch.zeros(rows, dtype=torch.int32, device=device)

    def reset_empty(self, row: int) -> None:
        """Nothing is resident: a long request that was just admitted. Whatever the row's last owner left is gone."""
        self.position_at[:, row] = -1
        self.referenced[:, row] = False
        self.hand[:, row] = 0

    def reset_short(self, row: int) -> None:
        """The first H positions are resident, each at its own hot index, those that are still to come included."""
        self.reset_empty(row)
        resident = min(self.device_buffer_size, self.max_context)
        identity = torch.arange(resident, device=self.hand.device)
        self.position_at[:, row, :resident] = identity.to(self.position_at.dtype)
        self.hot_of[:, row, :resident] = identity.to(self.hot_of.dtype)

    def check_integrity(self, row: int) -> None:
        """Raise SlotAccountingError unless every filled hot index is where its position is said to be."""
        for position_at, hot_of in zip(self.position_at[:, row].long(), self.hot_of[:, row], strict=True):
            filled = (position_at >= 0).nonzero().squeeze(1)
            if not torch.equal(hot_of[position_at[filled]].long(), filled):
                raise SlotAccountingError(f"row {row}: hot indices and positions disagree")

    def lookup(self, index_layer: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hot index of each position of a long row, -1 where it is not resident. rows: int64 [batch]. positions: int64
        [batch, k], at least 0. Returns int64 [batch, k]."""
        hot = self.hot_of[index_layer, rows[:, None], positions].long()
        return torch.where(self.position_at[index_layer, rows[:, None], hot] == positions, hot, -1)

    def resolve(self, index_layer: int, rows: torch.Tensor, positions: torch.Tensor, newest: torch.Tensor) -> MissPlan:
        """Decide hits, misses and victims of one step in one index layer, and record the new residency.

        rows: int64 [batch], distinct. positions: int64 [batch, k], each -1 or at most the row's newest. newest: int64
        [batch]. Raises ValueError if k exceeds the buffer, in which case victims might not suffice.
        """
        if positions.shape[1] > self.device_buffer_size:
            raise ValueError(
                f"{positions.shape[1]} positions selected, device_buffer_size is {self.device_buffer_size}: "
                "the buffer must hold all that one step selects"
            )
        hot = positions.clone()
        selected = int((positions >= 0).sum())
        # Short rows are resolved: all that follows is about the long ones, which are these entries of the batch.
        long = (newest >= self.device_buffer_size).nonzero().squeeze(1)
        rows, positions, newest = rows[long], positions[long], newest[long]

        table = self.hot_of[index_layer].view(-1)
        is_newest = positions == newest[:, None]
        looked_up = (positions >= 0) & ~is_newest
        address = rows[:, None] * self.max_context + positions.clamp(min=0)
        found = torch.where(looked_up, self.lookup(index_layer, rows, positions.clamp(min=0)), -1)

        protected = torch.zeros((len(rows), self.device_buffer_size), dtype=torch.bool, device=rows.device)
        hit_batch, hit_place = (found >= 0).nonzero(as_tuple=True)
        protected[hit_batch, found[hit_batch, hit_place]] = True
        self.referenced[index_layer, rows] |= protected

        batch, place = _first_occurrences(table, address, looked_up & (found < 0))
        miss_positions = positions[batch, place]
        victims = self._take_victims(index_layer, rows, protected, torch.bincount(batch, minlength=len(rows)))
        table[address[batch, place]] = victims.to(table.dtype)
        self.position_at[index_layer, rows[batch], victims] = miss_positions.to(self.position_at.dtype)

        resolved = torch.where(looked_up, table[address].long(), -1)
        hot[long] = torch.where(is_newest, self.device_buffer_size, resolved)
        return MissPlan(hot, long[batch], miss_positions, victims, hits=selected - len(batch))

    def _take_victims(
        self, index_layer: int, rows: torch.Tensor, protected: torch.Tensor, misses: torch.Tensor
    ) -> torch.Tensor:
        """Move the clocks: victims for each row's misses (int64 [batch] counts), flat, in the order of the misses."""
        missing = misses.nonzero().squeeze(1)
        rows, wanted = rows[missing], misses[missing, None]
        size = self.device_buffer_size
        offset = torch.arange(size, device=rows.device)
        clock = (self.hand[index_layer, rows, None].long() + offset) % size
        unprotected = ~protected[missing].gather(1, clock)
        bit = self.referenced[index_layer, rows].gather(1, clock)
        first_lap, second_lap = unprotected & ~bit, unprotected & bit
        in_first_lap = first_lap.sum(1, keepdim=True)
        rank = torch.where(first_lap, first_lap.cumsum(1), in_first_lap + second_lap.cumsum(1)) - 1
        victim = unprotected & (rank < wanted)
        last = (unprotected & (rank == wanted - 1)).int().argmax(1)

        passed = second_lap & ((offset < last[:, None]) | (wanted > in_first_lap))
        self.referenced[index_layer, rows[:, None], clock] = bit & ~passed
        self.hand[index_layer, rows] = ((clock[:, 0] + last + 1) % size).to(self.hand.dtype)

        before = wanted.cumsum(0) - wanted
        victims = torch.empty(int(wanted.sum()), dtype=torch.int64, device=rows.device)
        victims[(before + rank)[victim]] = clock[victim]
        return victims


def _first_occurrences(
    table: torch.Tensor, address: torch.Tensor, miss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch index and place of the first of each distinct missing position, in batch and then top-k order.

    Every missing entry bids its place into the position table, the smallest wins; `table` is left with the bids, for
    the caller to overwrite with hot indices. (On a GPU: atomicMin.)
    """
    batch, place = miss.nonzero(as_tuple=True)
    bids = place.to(table.dtype)
    table.scatter_reduce_(0, address[batch, place], bids, "amin", include_self=False)
    first = table[address[batch, place]] == bids
    return batch[first], place[first]
