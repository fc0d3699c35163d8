"""Attention to fp8 items of 512 + 64 elements on Hopper, by 64 heads at a time: `triton_attend._attend_split` in Gluon.

Gluon is Triton with layouts chosen by hand, and warps with work of their own (FlashAttention-3: Shah et al.,
arXiv:2407.08608). Four warps read items and scale them to bfloat16 in shared memory, a tile ahead of the eight that
multiply. These share the product of queries and keys, which Triton would have each warpgroup compute.

No product is in flight while another's sums are read: the compiler would then have every product wait for the one
before, all of them.

A thread that scales holds parts of one item only: lanes 4n to 4n + 3 of a warp hold its row n. So an item's address is
computed once, and the 16-byte stores of 8 lanes, two rows of 64 bytes each, meet different banks of shared memory.
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
WARPS = 8
"""That multiply."""
LATENT_DIM, ROPE_DIM = 512, 64

_HEADS = gl.constexpr(HEADS)
_ROWS = gl.constexpr(ROWS)
_HALF = gl.constexpr(ROWS // 2)
_WARPS = gl.constexpr(WARPS)
_SCALING_WARPS = gl.constexpr(4)
_LATENT = gl.constexpr(LATENT_DIM)
_ROPE = gl.constexpr(ROPE_DIM)
_ITEM_WORDS = gl.constexpr(164)
_GROUPS = gl.constexpr(4)
"""Of latent elements that share a scale."""
_SCALING_REGISTERS = gl.constexpr(120)
_FLOOR = gl.constexpr(-1e30)
"""Below every score and yet finite: an absent row's score is -inf, and -inf less this is still -inf rather than NaN."""


@gluon.jit  # type: ignore[untyped-decorator]
def _load_rows(
    rows: gl.tensor, first: gl.tensor, end: gl.tensor, count: gl.constexpr, layout: gl.constexpr
) -> gl.tensor:
    """Row numbers of the tile that begins at `first`, -1 where there is none."""
    column = first + gl.arange(0, count, layout=layout)
    return gl.load(rows + column, mask=column < end, other=-1)


@gluon.jit  # type: ignore[untyped-decorator]
def _load_items(
    items: gl.tensor, row: gl.tensor, tile_layout: gl.constexpr, rope_layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Three parts of the items, in words as they are stored: latents [rows, groups, 32], scales [rows, groups] and
    ropes [rows, 32]. Words take a fourth of the registers that as many single bytes take."""
    by_scale: gl.constexpr = gl.SliceLayout(2, tile_layout)
    group = gl.arange(0, _GROUPS, layout=gl.SliceLayout(0, by_scale))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile_layout)))
    item = items + row * _ITEM_WORDS
    present = row >= 0
    latents = gl.load(
        item[:, None, None] + group[None, :, None] * 32 + word[None, None, :], mask=present[:, None, None], other=0
    )
    scales = gl.load(item[:, None] + _LATENT // 4 + group[None, :], mask=present[:, None], other=0)
    row = gl.convert_layout(row, gl.SliceLayout(1, rope_layout))
    word = gl.arange(0, _ROPE // 2, layout=gl.SliceLayout(0, rope_layout))
    begin: gl.constexpr = _LATENT // 4 + _GROUPS
    ropes = gl.load(items + (row * _ITEM_WORDS)[:, None] + begin + word[None, :], mask=(row >= 0)[:, None], other=0)
    return latents, scales.to(gl.float32, bitcast=True), ropes


@gluon.jit  # type: ignore[untyped-decorator]
def _prefetch(items: gl.tensor, row: gl.tensor, layout: gl.constexpr) -> None:
    """Have the cache lines of the items brought to the L2 cache."""
    word = gl.minimum(32 * gl.arange(0, 8, layout=gl.SliceLayout(0, layout)), _ITEM_WORDS - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.b32 $0, 0;",
        "=r,l",
        [items + (gl.maximum(row, 0) * _ITEM_WORDS)[:, None] + word[None, :]],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _to_bfloat16(latents: gl.tensor, scales: gl.tensor) -> gl.tensor:
    """Words of four fp8 numbers [rows, groups, 32], scaled, as words of two bfloat16 [rows, 256]."""
    first, second = gl.inline_asm_elementwise(
        """{
            .reg .b16 l, h, a, b, c, d;
            .reg .b32 ab, cd;
            .reg .f32 e, f, g, i;
            mov.b32 {l, h}, $2;
            cvt.rn.f16x2.e4m3x2 ab, l;
            cvt.rn.f16x2.e4m3x2 cd, h;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.f32.f16 g, c;
            cvt.f32.f16 i, d;
            mul.f32 e, e, $3;
            mul.f32 f, f, $3;
            mul.f32 g, g, $3;
            mul.f32 i, i, $3;
            cvt.rn.bf16x2.f32 $0, f, e;
            cvt.rn.bf16x2.f32 $1, i, g;
        }""",
        "=r,=r,r,f",
        [latents, scales[:, :, None]],
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
    ready: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
    prefetches: gl.constexpr,
) -> None:
    """Read the items of each tile and put them, scaled to bfloat16, where `_attend_tiles` takes them."""
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [_SCALING_WARPS, 1, 1], [2, 0, 1])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_SCALING_WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, tile_layout))
    shared_words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    line_layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [_SCALING_WARPS, 1], [1, 0])
    row = _load_rows(rows, begin, end, _HALF, row_layout)
    ahead = _load_rows(rows, begin + _ROWS, end, _ROWS, gl.SliceLayout(1, line_layout))
    latents, scales, ropes = _load_items(items, row, tile_layout, rope_layout)
    row = _load_rows(rows, begin + _HALF, end, _HALF, row_layout)
    for first in range(begin, end, _ROWS):
        turn = (first - begin) // _ROWS
        place = turn % 2
        if prefetches:
            _prefetch(items, ahead, line_layout)
            ahead = _load_rows(rows, first + 2 * _ROWS, end, _ROWS, gl.SliceLayout(1, line_layout))
        # The first two tiles find their place free: the phase before the first counts as over.
        mbarrier.wait(free.index(place), (turn // 2 + 1) % 2)
        latent_words = latent_tiles.index(place)._reinterpret(gl.int32, [_ROWS, _LATENT // 2], shared_words)
        rope_words = rope_tiles.index(place)._reinterpret(gl.int32, [_ROWS, _ROPE // 2], shared_words)
        for half in gl.static_range(2):
            latent_words.slice(half * _HALF, _HALF).store(_to_bfloat16(latents, scales))
            rope_words.slice(half * _HALF, _HALF).store(ropes)
            latents, scales, ropes = _load_items(items, row, tile_layout, rope_layout)
            row = _load_rows(rows, first + (half + 2) * _HALF, end, _HALF, row_layout)
        fence_async_shared()
        mbarrier.arrive(ready.index(place))


@gluon.jit  # type: ignore[untyped-decorator]
def _attend_tiles(
    queries: gl.tensor,
    rows: gl.tensor,
    partial: gl.tensor,
    log_sums: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    scale: gl.tensor,
    query: gl.tensor,
    first_head: gl.tensor,
    heads: gl.constexpr,
    query_latents: gl.shared_memory_descriptor,
    query_ropes: gl.shared_memory_descriptor,
    shared_weights: gl.shared_memory_descriptor,
    latent_tiles: gl.shared_memory_descriptor,
    rope_tiles: gl.shared_memory_descriptor,
    ready: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
) -> None:
    """Attend to the tiles of `_scale_tiles` by a tile of a query's heads, and write the result."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, _ROWS // 2, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, _WARPS // 4], [16, 256, 16])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_WARPS, 1], [1, 0])
    wide_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    item_dim: gl.constexpr = _LATENT + _ROPE

    head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, wide_layout))
    column = gl.arange(0, _LATENT, layout=gl.SliceLayout(0, wide_layout))
    query_rows = queries + (query * heads + head[:, None]) * item_dim
    query_latents.store(gl.load(query_rows + column[None, :], mask=(head < heads)[:, None], other=0.0))
    head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, rope_layout))
    column = _LATENT + gl.arange(0, _ROPE, layout=gl.SliceLayout(0, rope_layout))
    query_rows = queries + (query * heads + head[:, None]) * item_dim
    query_ropes.store(gl.load(query_rows + column[None, :], mask=(head < heads)[:, None], other=0.0))
    fence_async_shared()

    highest = gl.full([_HEADS], _FLOOR, gl.float32, layout=gl.SliceLayout(1, score_layout))
    total = gl.full([_HEADS], 0.0, gl.float32, layout=gl.SliceLayout(1, score_layout))
    attended = gl.full([_HEADS, _LATENT], 0.0, gl.float32, layout=sum_layout)
    for first in range(begin, end, _ROWS):
        turn = (first - begin) // _ROWS
        place = turn % 2
        present = _load_rows(rows, first, end, _ROWS, gl.SliceLayout(0, score_layout)) >= 0
        item_latents, item_ropes = latent_tiles.index(place), rope_tiles.index(place)
        mbarrier.wait(ready.index(place), turn // 2 % 2)
        scores = gl.full([_HEADS, _ROWS], 0.0, gl.float32, layout=score_layout)
        multiplying = warpgroup_mma(query_latents, item_latents.permute((1, 0)), scores, is_async=True, use_acc=False)
        multiplying = warpgroup_mma(query_ropes, item_ropes.permute((1, 0)), multiplying, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[multiplying])

        scores = gl.where(present[None, :], scores * scale, float("-inf"))
        new_highest = gl.maximum(highest, gl.max(scores, 1))
        weights = gl.exp2(scores - new_highest[:, None])
        decay = gl.exp2(highest - new_highest)
        total = total * decay + gl.sum(weights, 1)
        highest = new_highest
        shared_weights.store(weights.to(gl.bfloat16))
        fence_async_shared()
        attended = attended * gl.convert_layout(decay, gl.SliceLayout(1, sum_layout))[:, None]
        adding = warpgroup_mma(shared_weights, item_latents, attended, is_async=True)
        attended = warpgroup_mma_wait(num_outstanding=0, deps=[adding])
        mbarrier.arrive(free.index(place))

    # The highest score weighs 1: only a split without rows has less, and then there is nothing to divide.
    divisor = gl.convert_layout(gl.maximum(total, 1.0), gl.SliceLayout(1, sum_layout))
    attended = attended / divisor[:, None]
    head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, score_layout))
    place = (query * heads + head) * gl.num_programs(1) + gl.program_id(1)
    gl.store(log_sums + place, highest + gl.log2(total), mask=head < heads)
    head = first_head + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, sum_layout))
    place = (query * heads + head) * gl.num_programs(1) + gl.program_id(1)
    column = gl.arange(0, _LATENT, layout=gl.SliceLayout(0, sum_layout))
    gl.store(
        partial + place[:, None] * _LATENT + column[None, :],
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
    prefetches: gl.constexpr,
) -> None:
    """One tile of a query's heads over one split of its rows.

    prefetches: items come to the L2 cache a tile ahead, which pays where a split has more than a few tiles.
    items: the pool as int32 [num_rows, 164]. Others and results: as in `_attend_split`.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    head_tiles: gl.constexpr = (heads + _HEADS - 1) // _HEADS
    query = (gl.program_id(0) // head_tiles).to(gl.int64)
    first_head = (gl.program_id(0) % head_tiles) * _HEADS
    begin = gl.program_id(1) * rows_per_split
    end = gl.minimum(begin + rows_per_split, k)
    rows += query * k

    query_latents = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _LATENT], shared)
    query_ropes = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _ROPE], shared)
    shared_weights = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _ROWS], shared)
    latent_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _LATENT], shared)
    rope_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _ROPE], shared)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=1)
    gl.warp_specialize(
        [
            (
                _attend_tiles,
                (
                    queries,
                    rows,
                    partial,
                    log_sums,
                    begin,
                    end,
                    scale,
                    query,
                    first_head,
                    heads,
                    query_latents,
                    query_ropes,
                    shared_weights,
                    latent_tiles,
                    rope_tiles,
                    ready,
                    free,
                ),
            ),
            (_scale_tiles, (items, rows, begin, end, latent_tiles, rope_tiles, ready, free, prefetches)),
        ],
        [_SCALING_WARPS],
        [_SCALING_REGISTERS],
    )
