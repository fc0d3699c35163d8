"""Attention to fp8 items of 512 + 64 elements on Hopper, by 64 heads at a time: `triton_attend._attend_split` in Gluon.

Gluon is Triton with layouts chosen by hand, and warps with work of their own (FlashAttention-3: Shah et al.,
arXiv:2407.08608). Four warps read items and write them, in bfloat16, to two tiles in shared memory, which take turns.
Two warpgroups multiply. Each has the scores of every second tile, and half of the columns of the sum, since registers
hold no more: so one computes scores and weights while the other adds up, as in FlashMLA's sparse decode
(github.com/deepseek-ai/FlashMLA, `docs/20250929-hopper-fp8-sparse-deep-dive.md`). What one tells the other of a tile,
its weights and the highest score so far, lies in shared memory. Weights take the place of the tile's RoPE part, which
nobody needs any more by then.

| barrier | says of a tile | arrivals |
| --- | --- | --- |
| ready | it is written | 1 |
| weighed | so are its weights | 1 |
| free | both warpgroups have added it up | 2 |

No sum is changed or read while a product is added to another that was computed before it: the compiler would then have
every product wait for the one before, all of them (its note C7514). It would do so, too, with fewer registers.

A thread that scales holds parts of one item only: lanes 4n to 4n + 3 of a warp hold its row n. So an item's address is
computed once, and the 16-byte stores of 8 lanes, two rows of 64 bytes each, meet different banks of shared memory. It
holds two items, of the two halves of a tile, so that one is on its way while the other is converted.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS = 64
ROWS = 64
WARPS = 4
"""Of each warpgroup."""
LATENT_DIM, ROPE_DIM = 512, 64

_HEADS = gl.constexpr(HEADS)
_ROWS = gl.constexpr(ROWS)
_HALF = gl.constexpr(ROWS // 2)
_WARPS = gl.constexpr(WARPS)
_LATENT = gl.constexpr(LATENT_DIM)
_HALF_LATENT = gl.constexpr(LATENT_DIM // 2)
_ROPE = gl.constexpr(ROPE_DIM)
_ITEM_WORDS = gl.constexpr(164)
_GROUPS = gl.constexpr(4)
"""Of latent elements that share a scale."""
_MULTIPLYING_REGISTERS = gl.constexpr(192)
_SCALING_REGISTERS = gl.constexpr(120)
_FLOOR = gl.constexpr(-1e30)
"""Below every score and yet finite: an absent row's score is -inf, and -inf less this is still -inf rather than NaN."""


@gluon.jit  # type: ignore[untyped-decorator]
def _load_rows(rows: gl.tensor, first: gl.tensor, end: gl.tensor, layout: gl.constexpr) -> gl.tensor:
    """Row numbers of the half tile that begins at `first`, -1 where there is none."""
    column = first + gl.arange(0, _HALF, layout=layout)
    return gl.load(rows + column, mask=column < end, other=-1)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_items(
    items: gl.tensor, row: gl.tensor, tile_layout: gl.constexpr, rope_layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """The parts of items, in words as they are stored: latents [rows, groups, 32], scales [rows, groups] and ropes
    [rows, 32]. Words take a fourth of the registers that as many single bytes take. And float32 [rows], which is to be
    added to their scores: -inf where there is no item."""
    by_scale: gl.constexpr = gl.SliceLayout(2, tile_layout)
    group = gl.arange(0, _GROUPS, layout=gl.SliceLayout(0, by_scale))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile_layout)))
    item = items + row * _ITEM_WORDS
    present = row >= 0
    latents = gl.load(
        item[:, None, None] + group[None, :, None] * 32 + word[None, None, :], mask=present[:, None, None], other=0
    )
    scales = gl.load(item[:, None] + _LATENT // 4 + group[None, :], mask=present[:, None], other=0)
    biases = gl.where(present, 0.0, float("-inf"))
    row = gl.convert_layout(row, gl.SliceLayout(1, rope_layout))
    word = gl.arange(0, _ROPE // 2, layout=gl.SliceLayout(0, rope_layout))
    begin: gl.constexpr = _LATENT // 4 + _GROUPS
    ropes = gl.load(items + (row * _ITEM_WORDS)[:, None] + begin + word[None, :], mask=(row >= 0)[:, None], other=0)
    return latents, scales.to(gl.float32, bitcast=True), ropes, biases


@gluon.jit  # type: ignore[untyped-decorator]
def _to_bfloat16(latents: gl.tensor, scales: gl.tensor) -> gl.tensor:
    """Words of four fp8 numbers [rows, groups, 32], scaled, as words of two bfloat16 [rows, 256].

    The bits of a float8_e4m3 number, its sign apart, are those of a bfloat16 number that is 2 ** 120 times smaller,
    which the scale makes good. The product is exact if the scale is a power of two, as `Fp8Format` makes them; another
    scale is rounded to bfloat16. A scale above 255 is taken for 255. NaN stays.
    """
    factors = gl.inline_asm_elementwise(
        """{
            .reg .f32 f;
            min.NaN.f32 f, $1, 0f437F0000;
            mul.f32 f, f, 0f7B800000;
            cvt.rn.bf16x2.f32 $0, f, f;
        }""",
        "=r,f",
        [scales],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    first, second = gl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, c, 0xEA;
            lop3.b32 b, b, 0x80008000, d, 0xEA;
            mul.rn.bf16x2 $0, a, $3;
            mul.rn.bf16x2 $1, b, $3;
        }""",
        "=r,=r,r,r",
        [latents, factors[:, :, None]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(first, second).reshape([_HALF, _LATENT // 2])


@gluon.jit  # type: ignore[untyped-decorator]
def _scale_tiles(
    items: gl.tensor,
    rows: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    latent_tiles: gl.shared_memory_descriptor,
    rope_tiles: gl.shared_memory_descriptor,
    tile_biases: gl.shared_memory_descriptor,
    ready: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
) -> None:
    """Read the items of each tile and put them, scaled to bfloat16, where `_attend` takes them."""
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [_WARPS, 1, 1], [2, 0, 1])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, tile_layout))
    shared_words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    row_a = _load_rows(rows, begin, end, row_layout)
    row_b = _load_rows(rows, begin + _HALF, end, row_layout)
    latents_a, scales_a, ropes_a, biases_a = _load_items(items, row_a, tile_layout, rope_layout)
    row_a = _load_rows(rows, begin + _ROWS, end, row_layout)
    latents_b, scales_b, ropes_b, biases_b = _load_items(items, row_b, tile_layout, rope_layout)
    row_b = _load_rows(rows, begin + _ROWS + _HALF, end, row_layout)
    for first in range(begin, end, _ROWS):
        turn = (first - begin) // _ROWS
        place = turn % 2
        # The first two tiles find their place free: the phase before the first counts as over.
        mbarrier.wait(free.index(place), (turn // 2 + 1) % 2)
        latent_words = latent_tiles.index(place)._reinterpret(gl.int32, [_ROWS, _LATENT // 2], shared_words)
        rope_words = rope_tiles.index(place)._reinterpret(gl.int32, [_ROWS, _ROPE // 2], shared_words)
        biases = tile_biases.index(place)
        latent_words.slice(0, _HALF).store(_to_bfloat16(latents_a, scales_a))
        rope_words.slice(0, _HALF).store(ropes_a)
        biases.slice(0, _HALF).store(biases_a)
        latents_a, scales_a, ropes_a, biases_a = _load_items(items, row_a, tile_layout, rope_layout)
        row_a = _load_rows(rows, first + 2 * _ROWS, end, row_layout)
        latent_words.slice(_HALF, _HALF).store(_to_bfloat16(latents_b, scales_b))
        rope_words.slice(_HALF, _HALF).store(ropes_b)
        biases.slice(_HALF, _HALF).store(biases_b)
        latents_b, scales_b, ropes_b, biases_b = _load_items(items, row_b, tile_layout, rope_layout)
        row_b = _load_rows(rows, first + 2 * _ROWS + _HALF, end, row_layout)
        fence_async_shared()
        mbarrier.arrive(ready.index(place))


@gluon.jit  # type: ignore[untyped-decorator]
def _load_queries(
    queries: gl.tensor,
    query: gl.tensor,
    first_head: gl.tensor,
    heads: gl.constexpr,
    begin: gl.constexpr,
    count: gl.constexpr,
    shared: gl.shared_memory_descriptor,
) -> None:
    """Put elements [begin, begin + count) of a tile of a query's heads into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, layout))
    column = begin + gl.arange(0, count, layout=gl.SliceLayout(0, layout))
    place = queries + (query * heads + head[:, None]) * (_LATENT + _ROPE) + column[None, :]
    shared.store(gl.load(place, mask=(head < heads)[:, None], other=0.0))


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_queries(
    query_latents: gl.shared_memory_descriptor,
    query_ropes: gl.shared_memory_descriptor,
    item_latents: gl.shared_memory_descriptor,
    item_ropes: gl.shared_memory_descriptor,
    layout: gl.constexpr,
) -> gl.tensor:
    """Scores [heads, rows], not scaled, of a tile of items."""
    scores = gl.full([_HEADS, _ROWS], 0.0, gl.float32, layout=layout)
    multiplying = warpgroup_mma(query_latents, item_latents.permute((1, 0)), scores, is_async=True, use_acc=False)
    multiplying = warpgroup_mma(query_ropes, item_ropes.permute((1, 0)), multiplying, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=[multiplying])


@gluon.jit  # type: ignore[untyped-decorator]
def _weigh(
    scores: gl.tensor,
    biases: gl.tensor,
    scale: gl.tensor,
    highest: gl.tensor,
    total: gl.tensor,
    shared_weights: gl.shared_memory_descriptor,
    shared_highest: gl.shared_memory_descriptor,
    weighed: gl.shared_memory_descriptor,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Tell both warpgroups the weights of a tile, and the highest score so far.

    Returns that, the sum of weights so far, and what sums so far are to be multiplied by.
    """
    scores = scores * scale + biases[None, :]
    higher = gl.maximum(highest, gl.max(scores, 1))
    weights = gl.exp2(scores - higher[:, None])
    shared_highest.store(higher)
    shared_weights.store(weights.to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(weighed)
    decay = gl.exp2(highest - higher)
    return higher, total * decay + gl.sum(weights, 1), decay


@gluon.jit  # type: ignore[untyped-decorator]
def _catch_up(highest: gl.tensor, total: gl.tensor, higher: gl.tensor) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """As `_weigh` returns them behind a tile that the other warpgroup has weighed. higher: what that one told."""
    decay = gl.exp2(highest - higher)
    return higher, total * decay, decay


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(shares: gl.tuple, heads: gl.constexpr, part: gl.constexpr) -> None:
    """What a warpgroup does: weights of the tiles number part, part + 2 and so on, and its half of the sum of all.

    shares: what both take, see `attend_split`.
    """
    (
        queries,
        partial,
        log_sums,
        begin,
        end,
        scale,
        query,
        first_head,
        query_latents,
        query_ropes,
        latent_tiles,
        rope_tiles,
        tile_biases,
        highest_scores,
        totals,
        ready,
        free,
        weighed,
        met,
    ) = shares
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ROWS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF_LATENT, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, score_layout)
    by_head_of_sum: gl.constexpr = gl.SliceLayout(1, sum_layout)
    by_row: gl.constexpr = gl.SliceLayout(0, score_layout)
    column: gl.constexpr = part * _HALF_LATENT

    own = query_latents.index(0).slice(column, _HALF_LATENT, dim=1)
    _load_queries(queries, query, first_head, heads, column, _HALF_LATENT, own)
    if part == 1:
        _load_queries(queries, query, first_head, heads, _LATENT, _ROPE, query_ropes.index(0))
    fence_async_shared()
    mbarrier.arrive(met.index(0))
    mbarrier.wait(met.index(0), 0)

    highest = gl.full([_HEADS], _FLOOR, gl.float32, layout=by_head)
    total = gl.full([_HEADS], 0.0, gl.float32, layout=by_head)
    attended = gl.full([_HEADS, _HALF_LATENT], 0.0, gl.float32, layout=sum_layout)
    for first in range(begin, end, 2 * _ROWS):
        phase = (first - begin) // (2 * _ROWS) % 2
        for number in gl.static_range(2):
            if first + number * _ROWS < end:
                # The number itself, but the compiler is not to know: it would keep descriptors of all products in
                # registers, of which there are too few.
                place = (first + number * _ROWS - begin) // _ROWS % 2
                zero = (first - begin) // _ROWS % 2
                weights, latents = rope_tiles.index(place), latent_tiles.index(place)
                if number == part:
                    mbarrier.wait(ready.index(place), phase)
                    scores = _multiply_queries(
                        query_latents.index(zero), query_ropes.index(zero), latents, weights, score_layout
                    )
                    highest, total, decay = _weigh(
                        scores,
                        tile_biases.index(place).load(by_row),
                        scale,
                        highest,
                        total,
                        weights,
                        highest_scores.index(place),
                        weighed.index(place),
                    )
                else:
                    mbarrier.wait(weighed.index(place), phase)
                    highest, total, decay = _catch_up(highest, total, highest_scores.index(place).load(by_head))
                attended = attended * gl.convert_layout(decay, by_head_of_sum)[:, None]
                half = latents.slice(column, _HALF_LATENT, dim=1)
                adding = warpgroup_mma(weights, half, attended, is_async=True)
                attended = warpgroup_mma_wait(num_outstanding=0, deps=[adding])
                mbarrier.arrive(free.index(place))

    totals.index(part).store(total)
    mbarrier.arrive(met.index(1))
    mbarrier.wait(met.index(1), 0)
    total = totals.index(0).load(by_head) + totals.index(1).load(by_head)
    # The highest score weighs 1: only a split without rows has less, and then there is nothing to divide.
    divisor = gl.convert_layout(gl.maximum(total, 1.0), by_head_of_sum)
    attended = attended / divisor[:, None]
    if part == 0:
        head = first_head + gl.arange(0, _HEADS, layout=by_head)
        place = (query * heads + head) * gl.num_programs(1) + gl.program_id(1)
        gl.store(log_sums + place, highest + gl.log2(total), mask=head < heads)
    head = first_head + gl.arange(0, _HEADS, layout=by_head_of_sum)
    place = (query * heads + head) * gl.num_programs(1) + gl.program_id(1)
    columns = column + gl.arange(0, _HALF_LATENT, layout=gl.SliceLayout(0, sum_layout))
    gl.store(
        partial + place[:, None] * _LATENT + columns[None, :],
        attended.to(partial.dtype.element_ty),
        mask=(head < heads)[:, None],
    )


@gluon.jit(do_not_specialize=["k", "rows_per_split"])  # type: ignore[untyped-decorator]
def attend_split(
    queries: gl.tensor,
    items: gl.tensor,
    rows: gl.tensor,
    partial: gl.tensor,
    log_sums: gl.tensor,
    k: gl.tensor,
    rows_per_split: gl.tensor,
    scale: gl.tensor,
    heads: gl.constexpr,
) -> None:
    """One tile of a query's heads over one split of its rows.

    items: the pool as int32 [num_rows, 164]. Others and results: as in `_attend_split`.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    head_tiles: gl.constexpr = (heads + _HEADS - 1) // _HEADS
    query = (gl.program_id(0) // head_tiles).to(gl.int64)
    first_head = (gl.program_id(0) % head_tiles) * _HEADS
    begin = gl.program_id(1) * rows_per_split
    end = gl.minimum(begin + rows_per_split, k)
    rows += query * k

    query_latents = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _LATENT], shared)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [1, _HEADS, _ROPE], shared)
    latent_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _LATENT], shared)
    rope_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _ROPE], shared)
    tile_biases = gl.allocate_shared_memory(gl.float32, [2, _ROWS], flat)
    highest_scores = gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat)
    totals = gl.allocate_shared_memory(gl.float32, [2, _HEADS], flat)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(weighed.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
        mbarrier.init(met.index(place), count=2)
    shares = (
        queries,
        partial,
        log_sums,
        begin,
        end,
        scale,
        query,
        first_head,
        query_latents,
        query_ropes,
        latent_tiles,
        rope_tiles,
        tile_biases,
        highest_scores,
        totals,
        ready,
        free,
        weighed,
        met,
    )
    gl.warp_specialize(
        [
            (_attend, (shares, heads, gl.constexpr(0))),
            (_attend, (shares, heads, gl.constexpr(1))),
            (_scale_tiles, (items, rows, begin, end, latent_tiles, rope_tiles, tile_biases, ready, free)),
        ],
        [_WARPS, _WARPS],
        [_MULTIPLYING_REGISTERS, _SCALING_REGISTERS],
    )
