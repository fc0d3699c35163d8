"""Pairs of a token and an expert, sorted by expert and cut into tiles, and the weighted sums of their results.

Launches depend on shapes alone: tables have room for the most rows and tiles that there can be, and how many there are
stands on the device. Few pairs are sorted by one kernel, in which each expert has a program that counts all pairs by
itself, so that programs need not meet. Many are sorted by torch's radix sort.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.triton.launch import follow, launch


@dataclass(frozen=True)
class Sorted:
    """Rows are the pairs whose expert this process has, expert by expert and in order of their number.

    The last rows are those of `shared`, tokens that go to the last expert without having chosen it.
    pairs: int32 [P], the pair (token * k + choice) of a row; token * k of shared ones. Those of `sort_many_pairs` are
    -1 between the end of an expert's rows and its last tile's.
    row: int32 [P], the row of a pair, if it has one.
    table: int32 [1 + most tiles, 4], how many rows and tiles there are, and of each tile the expert, the first row and
    the end of the expert's rows. They are one tensor since few tiles then lie in the cache line that says how many.
    """

    pairs: torch.Tensor
    row: torch.Tensor
    table: torch.Tensor
    shared: range

    @property
    def counts(self) -> torch.Tensor:
        """Rows and tiles: int32 [2]."""
        return self.table[0, :2]

    @property
    def tiles(self) -> torch.Tensor:
        """int32 [most tiles, 3], as the table has them."""
        return self.table[1:, :3]


def sort_pairs(ids: torch.Tensor, first_expert: int, experts: int, block_m: int, shared: range | None = None) -> Sorted:
    """Sort ids, integers [T, k], into tiles of block_m rows of one of `experts` experts from first_expert on.

    The rows of ids are contiguous, and may lie apart. shared: the last expert is not one of those, and computes these
    tokens. Takes as long as one multiprocessor takes to look at all pairs twice.
    """
    count = ids.numel()
    most_rows = count + len(shared or ())
    most_tiles = min(most_rows, most_rows // block_m + experts)
    pairs, row, table = (
        torch.empty(shape, dtype=torch.int32, device=ids.device) for shape in (most_rows, count, (1 + most_tiles, 4))
    )
    chunk = min(_CHUNK, max(_LEAST_CHUNK, triton.next_power_of_2(count)))
    launch(
        _sort, (experts,), ids.device,
        ids, ids.stride(0), pairs, row, table,
        count, first_expert, shared.start if shared else 0, len(shared or ()),
        experts if shared is None else experts - 1, block_m,
        top_k=ids.shape[1], bins=triton.next_power_of_2(experts + 1), chunk=chunk,
        num_warps=4 if chunk < _CHUNK else 8,
    )  # fmt: skip
    return Sorted(pairs, row, table, shared or range(0))


def sort_many_pairs(
    ids: torch.Tensor, first_expert: int, experts: int, block_m: int, shared: range | None = None
) -> Sorted:
    """`sort_pairs` of many pairs, with each expert's rows from a multiple of block_m on."""
    chosen = experts if shared is None else experts - 1
    shared = shared or range(0)
    top_k, count, most_tiles = ids.shape[1], ids.numel(), (ids.numel() + len(shared)) // block_m + experts
    most_rows = most_tiles * block_m
    number = torch.arange(max(count, most_tiles), device=ids.device)
    local = ids.flatten() - first_expert
    local = torch.where((local >= 0) & (local < chosen), local, chosen).to(torch.int16)
    expert, pair = torch.sort(local, stable=True)
    experts_here = torch.arange(chosen + 1, dtype=torch.int16, device=ids.device)
    begin = torch.searchsorted(expert, experts_here)  # of each expert's pairs
    of_expert = begin.diff()
    if chosen < experts:
        of_expert = torch.nn.functional.pad(of_expert, (0, 1), value=len(shared))
    tiles_end = torch.div(of_expert + block_m - 1, block_m, rounding_mode="floor").cumsum(0)
    first_row = torch.nn.functional.pad(tiles_end, (1, 0)) * block_m

    index = expert.int()
    place = torch.where(index < chosen, first_row[index] + number[:count] - begin[index], most_rows).int()
    row = torch.empty(count, dtype=torch.int32, device=ids.device)
    row[pair] = place
    pairs = torch.full((most_rows + 1,), -1, dtype=torch.int32, device=ids.device)
    pairs[place] = pair.int()
    if shared:
        tokens = torch.arange(shared.start, shared.stop, dtype=torch.int32, device=ids.device)
        pairs[first_row[chosen] + number[: len(shared)]] = tokens * top_k

    tile = number[:most_tiles]
    owner = torch.searchsorted(tiles_end, tile, right=True).clamp_(max=experts - 1)
    end = first_row[:-1] + of_expert
    table = torch.zeros((1 + most_tiles, 4), dtype=torch.int32, device=ids.device)
    table[0, 0], table[0, 1] = end[-1], tiles_end[-1]
    table[1:, :3] = torch.stack([owner, tile * block_m, end[owner]], 1)
    return Sorted(pairs[:-1], row, table, shared)


_LEAST_CHUNK, _CHUNK = 128, 4096
"""Pairs that are looked at together."""


@triton.jit(do_not_specialize=["count", "first_expert", "shared_first", "shared_count"])
def _sort(
    ids: tensor, ids_stride: tensor, pairs: tensor, rows: tensor, table: tensor,
    count: tensor, first_expert: tensor, shared_first: tensor, shared_count: tensor,
    chosen: constexpr, block_m: constexpr,
    top_k: constexpr, bins: constexpr, chunk: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """The rows and tiles of one expert. chosen: how many there are that ids choose among; one more is shared."""
    follow(chained)
    expert = tl.program_id(0)
    number = tl.arange(0, bins)
    of_expert = tl.zeros([bins], tl.int32)
    for begin in range(0, count, chunk):
        of_expert += tl.histogram(_local(ids, ids_stride, begin, count, first_expert, chosen, top_k, chunk), bins)
    of_expert = tl.where(number < chosen, of_expert, tl.where(number == chosen, shared_count, 0))
    tiles_of = (of_expert + block_m - 1) // block_m
    row = tl.sum(tl.where(number < expert, of_expert, 0), 0)
    end = row + tl.sum(tl.where(number == expert, of_expert, 0), 0)
    if expert == 0:
        tl.store(table, tl.sum(of_expert, 0))
        tl.store(table + 1, tl.sum(tiles_of, 0))

    tile = table + 4 * (1 + tl.sum(tl.where(number < expert, tiles_of, 0), 0))
    for first in range(row, end, block_m):
        tl.store(tile, expert)
        tl.store(tile + 1, first)
        tl.store(tile + 2, end)
        tile += 4

    if expert < chosen:
        for begin in range(0, count, chunk):
            pair = begin + tl.arange(0, chunk)
            mine = (_local(ids, ids_stride, begin, count, first_expert, chosen, top_k, chunk) == expert).to(tl.int32)
            place = row + tl.cumsum(mine, 0) - 1
            tl.store(pairs + place, pair, mask=mine > 0)
            tl.store(rows + pair, place, mask=mine > 0)
            row += tl.sum(mine, 0)
    else:
        for begin in range(0, shared_count, chunk):
            number_shared = begin + tl.arange(0, chunk)
            real = number_shared < shared_count
            tl.store(pairs + row + number_shared, (shared_first + number_shared) * top_k, mask=real)


@triton.jit
def _local(
    ids: tensor, ids_stride: tensor, begin: tensor, count: tensor, first_expert: tensor,
    chosen: constexpr, top_k: constexpr, chunk: constexpr,
) -> tensor:  # fmt: skip
    """The experts of a chunk of pairs, counted from the first that is here; `chosen` for those that are not."""
    pair = begin + tl.arange(0, chunk)
    place = ids + pair // top_k * ids_stride + pair % top_k
    local = tl.load(place, mask=pair < count, other=-1).to(tl.int32) - first_expert
    here = (local >= 0) & (local < chosen) & (pair < count)
    return tl.where(here, local, chosen)


_GATHERED = 2048
"""Channels of a row that are copied together."""


def gather_rows(
    x: torch.Tensor, x_scales: torch.Tensor, order: Sorted, top_k: int, room: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens x [T, K] of the first `room` rows, in fp8 [room, K], and their scales, float32.

    If there are no more rows, in n tiles of block_m, the scales begin with [K / 128, n * block_m]. What belongs to rows
    that have no pair is undefined.
    """
    k, num_blocks = x.shape[1], x_scales.shape[1]
    values = torch.empty(room, k, dtype=x.dtype, device=x.device)
    scales = torch.empty(room * num_blocks, dtype=torch.float32, device=x.device)
    launch(
        _gather, (room,), x.device,
        x.view(torch.uint8), x.stride(0), x_scales, *x_scales.stride(), order.pairs, order.counts,
        values.view(torch.uint8), scales, room, k, num_blocks, block_m,
        top_k=top_k, block=_GATHERED, scale_block=triton.next_power_of_2(num_blocks), num_warps=4,
    )  # fmt: skip
    return values, scales


@triton.jit(do_not_specialize=["room"])
def _gather(
    x: tensor, x_stride: tensor, x_scales: tensor, row_stride: tensor, block_stride: tensor, pairs: tensor,
    counts: tensor, values: tensor, scales: tensor, room: tensor, k: tensor, num_blocks: tensor, block_m: tensor,
    top_k: constexpr, block: constexpr, scale_block: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One row."""
    follow(chained)
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs + row)
    if pair >= 0:
        token = (pair // top_k).to(tl.int64)
        for begin in range(0, k, block):
            column = begin + tl.arange(0, block)
            value = tl.load(x + token * x_stride + column, mask=column < k)
            tl.store(values + row * k + column, value, mask=column < k)
        number = tl.arange(0, scale_block)
        count = tl.minimum(tl.load(counts + 1) * block_m, room)
        scale = tl.load(x_scales + token * row_stride + number * block_stride, mask=number < num_blocks)
        tl.store(scales + number.to(tl.int64) * count + row, scale, mask=number < num_blocks)


_SUMMED = 1024
"""Channels of a token's sum that one program adds up."""

_SUM_TOKENS = 256
"""With more tokens programs add up twice as many channels, so that all of them run at once."""

_SKIP_TOKENS, _SKIP_WARPS = 2048, 8
"""With more tokens a program adds up all channels of one, and passes over rows that are not here. Its warps."""


def weighted_sum(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    order: Sorted,
    first_expert: int,
    count: int,
    begin: int,
    out: torch.Tensor,
) -> None:
    """Write the tokens of ids and weights [T, k], which are those of `out`, bfloat16 [all tokens, H], from `begin` on.

    rows: bfloat16 [P, H], or float32 [splits, P, H], of which the sum over the splits is rounded first. The rows of ids
    and weights are contiguous, and may lie apart. count: experts here that ids choose among, from first_expert on;
    others contribute nothing.
    """
    tokens, top_k = ids.shape
    size = out.shape[1]
    skips, warps, block = False, 4, _SUMMED if tokens <= _SUM_TOKENS else 2 * _SUMMED
    if tokens > _SKIP_TOKENS:
        skips, warps, block = True, _SKIP_WARPS, triton.next_power_of_2(size)
    launch(
        _weigh, (tokens, triton.cdiv(size, block)), out.device,
        rows, ids, ids.stride(0), weights, weights.stride(0), order.row, order.counts, out,
        begin, order.shared.start, len(order.shared), len(order.pairs), size, first_expert, count, top_k,
        splits=len(rows) if rows.dim() == 3 else 1, block=block, skips=skips, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["begin", "shared_first", "shared_count", "num_rows", "first_expert", "count"])
def _weigh(
    rows: tensor, ids: tensor, ids_stride: tensor, weights: tensor, weights_stride: tensor, row_of: tensor,
    counts: tensor, out: tensor,
    begin: tensor, shared_first: tensor, shared_count: tensor, num_rows: tensor, size: tensor, first_expert: tensor,
    count: tensor, top_k: constexpr, splits: constexpr, block: constexpr, skips: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """A block of one token's weighted sum."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(top_k):
        local = tl.load(ids + token * ids_stride + choice) - first_expert
        here = (local >= 0) & (local < count)
        if here | (not skips):
            row = tl.load(row_of + token * top_k + choice, mask=here, other=0)
            value = _row(rows, row, here & (column < size), column, num_rows, size, splits)
            total += tl.load(weights + token * weights_stride + choice, mask=here, other=0.0) * value
    number = tl.program_id(0) - shared_first
    here = (number >= 0) & (number < shared_count)
    row = tl.load(counts, mask=here, other=0) - shared_count + number
    total += _row(rows, row, here & (column < size), column, num_rows, size, splits)
    place = (begin + token) * size + column
    tl.store(out + place, total.to(tl.bfloat16), mask=column < size)


@triton.jit
def _row(
    rows: tensor, row: tensor, real: tensor, column: tensor, num_rows: tensor, size: tensor,
    splits: constexpr,
) -> tensor:  # fmt: skip
    """A block of the sum over the splits of one row, rounded to bfloat16; zeros where it is not real."""
    place = rows + row.to(tl.int64) * size + column
    value = tl.load(place, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, splits):
        value += tl.load(place + split * (num_rows.to(tl.int64) * size), mask=real, other=0.0)
    return value.to(tl.bfloat16).to(tl.float32)
