"""Which positions are in the hot buffer, and which of them a miss evicts.

State is kept per row (running request) and index layer; all layers of an index layer's group share it. A row's hot
buffer has H = `device_buffer_size` ordinary hot indices 0 .. H-1, and W = `window` extra ones H .. H+W-1 for the tokens
that a step computes. W is 1 on a node that does not draft.

A step gives every row its newest position n and one or several queries. Each query selects at most H positions in top-k
order (-1 = none), none of them beyond the query's own position. Positions n .. n+W-1 are the row's *window*. Those that
are selected are *own tokens*, whose items the step itself stores. What the row selects is the concatenation of its
queries' selections, query 0 first.

**Short rows** (n + W <= I, where I is H unless the row is *resident*): position p lives at hot index p, always.
Everything is a hit; no state is read or written. Residency is initialised to positions 0 .. H-W at their own hot
indices, reference bits 0, hand 0. That is what a short row has become when it turns long, and the first position that
was ever beyond its newest is H-W+1: from there on, hot indices may hold tokens that were drafted and rejected.

A *resident* row has a hot index for every position of the context, so I is larger than any n + W. It is made of a short
row, or of a long one whose items were all copied to other slots. It turns long when its owner takes slots from it: then
it keeps the last ones, whose positions are resident as far as they were verified (`reset_range`).

**Long rows**: own token p is at hot index H + p - n. It is a hit. What was there a step ago is simply no longer
resident. Other selected positions are looked up:

1. *Cut*: query j and all after it select nothing if queries 0 .. j look up more than H distinct positions. Query 0 is
   never cut.
2. *Hits* are protected for this step and get their reference bit set.
3. *Misses*: repeated positions count once, at their first place in the concatenation. Let there be m of them.
4. *Victims* are found by CLOCK with reference bits (Corbató, "A Paging Experiment with the Multics System", 1968).
   The hot indices 0 .. H-1 are walked once around, starting at the hand and skipping protected ones. Those with bit 0
   are victims, in that order, until there are m; an empty hot index has bit 0. Those with bit 1 that are passed before
   the m-th victim lose the bit. If one revolution did not give m victims, a second one from the same starting point
   takes the rest, in order, from those that lost their bit in the first. What was filled in the first is not taken.
5. The i-th distinct miss takes the i-th victim, whose old position is no longer resident. Its bit is 0: a position
   has to be selected again to be spared by the hand, so what is selected once goes first. (With the bit set, as in the
   original, the hit rate was up to 4 points lower on traces that favour recent positions.)
6. The hand moves to just after the m-th victim. With m = 0 it stays and no bit is lost.

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


@dataclass(frozen=True)
class MissPlan:
    """Where every selected position is after a resolve, and what has to be copied for that to be true.

    hot: int64 [batch, queries, k], hot index of each selected position, -1 where there is none. valid: int64 [batch],
    how many queries of each row were not cut. miss_batch, miss_positions, miss_hot: int64 [misses], the distinct misses
    by batch index and, within it, in the order of their first places. hits: selected entries that need no copy of their
    own, repeated misses included.
    """

    hot: torch.Tensor
    valid: torch.Tensor
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
        self,
        num_index_layers: int,
        max_requests: int,
        max_context: int,
        device_buffer_size: int,
        device: torch.device,
        window: int = 1,
    ) -> None:
        rows = (num_index_layers, max_requests)
        self.device_buffer_size = device_buffer_size
        self.window = window
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
        """Positions 0 .. H-W are resident, each at its own hot index, those that are still to come included."""
        self.reset_range(row, 0, min(self.device_buffer_size + 1 - self.window, self.max_context))

    def reset_range(self, row: int, first: int, stop: int) -> None:
        """Positions `first` to `stop` - 1, if any, or as many as there are hot indices, are resident from hot index 0
        on."""
        self.reset_empty(row)
        stop = max(first, min(stop, first + self.device_buffer_size))
        positions = torch.arange(first, stop, device=self.hand.device)
        self.position_at[:, row, : len(positions)] = positions.to(self.position_at.dtype)
        self.hot_of[:, row, first : first + len(positions)] = (positions - first).to(self.hot_of.dtype)

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

    def resolve(
        self,
        index_layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        newest: torch.Tensor,
        valid: torch.Tensor | None = None,
        identity: torch.Tensor | None = None,
    ) -> MissPlan:
        """Decide cuts, hits, misses and victims of one step in one index layer, and record the new residency.

        rows: int64 [batch], distinct. positions: int64 [batch, queries, k], each -1 or at most its query's position.
        newest: int64 [batch]. valid: int64 [batch], how many of its queries each row has; None for all. identity: int64
        [batch], I of each row; None for H. Raises ValueError if k exceeds the buffer, in which case victims might not
        suffice.
        """
        size = self.device_buffer_size
        batch, queries, k = positions.shape
        if k > size:
            raise ValueError(
                f"{k} positions selected, device_buffer_size is {size}: the buffer must hold all that a query selects"
            )
        valid = newest.new_full((batch,), queries) if valid is None else valid.clone()
        query = torch.arange(queries, device=rows.device).repeat_interleave(k)
        positions = torch.where(query < valid[:, None], positions.flatten(1), -1)
        hot = positions.clone()
        # Short rows are resolved: all that follows is about the long ones, which are these entries of the batch.
        long = (newest + self.window > (size if identity is None else identity)).nonzero().squeeze(1)
        rows, positions, newest = rows[long], positions[long], newest[long, None]

        looked_up = (positions >= 0) & (positions < newest)
        first = looked_up & _first_occurrences(positions)
        distinct = first.view(-1, queries, k).sum(2).cumsum(1)
        valid[long] = torch.minimum(valid[long], (distinct <= size).sum(1))
        uncut = query < valid[long, None]
        is_own, looked_up, first = uncut & (positions >= newest), uncut & looked_up, uncut & first

        address = positions.clamp(min=0)
        found = torch.where(looked_up, self.lookup(index_layer, rows, address), -1)
        protected = torch.zeros((len(rows), size), dtype=torch.bool, device=rows.device)
        hit_batch, hit_place = (found >= 0).nonzero(as_tuple=True)
        protected[hit_batch, found[hit_batch, hit_place]] = True
        self.referenced[index_layer, rows] |= protected

        miss_batch, place = (first & (found < 0)).nonzero(as_tuple=True)
        miss_rows, miss_positions = rows[miss_batch], positions[miss_batch, place]
        misses = torch.bincount(miss_batch, minlength=len(rows))
        victims = self._take_victims(index_layer, rows, protected, misses)
        self.hot_of[index_layer, miss_rows, miss_positions] = victims.to(self.hot_of.dtype)
        self.position_at[index_layer, miss_rows, victims] = miss_positions.to(self.position_at.dtype)

        now_at = self.hot_of[index_layer, rows[:, None], address].long()
        hot[long] = torch.where(is_own, size + positions - newest, torch.where(looked_up, now_at, -1))
        hits = int((hot >= 0).sum()) - len(victims)
        return MissPlan(hot.view(batch, queries, k), valid, long[miss_batch], miss_positions, victims, hits)

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


def _first_occurrences(positions: torch.Tensor) -> torch.Tensor:
    """Which entries are the first of their value in their row. positions: int64 [batch, places]. Returns bool."""
    ordered, place = positions.sort(dim=1, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(is_first).scatter_(1, place, is_first)
