"""Routed experts with block-fp8 weights as Triton kernels that stream the weights of each used expert once.

Five kernels, of tokens that are quantised: sort pairs of a token and an expert into tiles; gate and up; SwiGLU and
quantisation; down; each token's weighted sum. Products are cut as in `kernels.triton.fp8_tile`. Programs loop over the
tiles that there are, so that launches depend on shapes alone and a CUDA graph serves every choice of experts. Where
DeepGEMM is installed (`kernels.deep_gemm`), it multiplies the gathered rows of whole chunks of prompts.

A token's result does not depend on the others while there are at most `FEW` of them; with more, channels are summed in
one run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from base.device import Download
from kernels.deep_gemm import ROWS, DeepGemm, deep_gemm
from kernels.fp8 import BLOCK, FP8, blocks, check_scales
from kernels.operands import SwiGluWeights
from kernels.triton.fp8_quantise import swiglu_quantise
from kernels.triton.fp8_tile import Tiling, described, multiply, multiply_wide
from kernels.triton.launch import follow, launch, properties
from kernels.triton.routing import Sorted, gather_rows, sort_many_pairs, sort_pairs, weighted_sum

FEW = 2048
"""The most tokens that are a decode step's: weights are streamed, and sums are those of one token alone."""

_MOST = 16384
"""Tokens that are computed at once. The more, the fewer rows of tiles are empty. Buffers have room for all of their
pairs: 3.2 GB for DeepSeek-V3.2, top-8. DeepGEMM computes as many tokens at once as have no more rows than that."""

_SPLIT_PAIRS = 64
"""With so few pairs, the runs of a tile's channels are shared among programs: they would be too few otherwise."""

_RUNS = 4
"""Runs of channels of a product, unless they were shorter than _LEAST_RUN."""

_LEAST_RUN = 4

_BLOCK = tl.constexpr(BLOCK)


def experts_fp8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: SwiGluWeights,
    shared: range | None = None,
) -> torch.Tensor:
    """See `kernels.ops.Ops`. H and W have to be multiples of 16 and of 128.

    x: float8_e4m3fn [T, H]; x_scales: float32 [T, H / 128 rounded up], of any strides; ids: int32 or int64 [T, k];
    weights: float32 [T, k]. The rows of each may lie apart, as those of `model.shard.RoutedTokens` do. Raises
    ValueError for tensors that do not fit together.
    """
    gate_up, down = experts.gate_up, experts.down
    check_scales(gate_up, experts.gate_up_scales)
    check_scales(down, experts.down_scales)
    (tokens, width), (count, hidden_size, inner) = x.shape, down.shape
    fits = gate_up.shape == (count, 2 * inner, hidden_size) and width == hidden_size and inner % BLOCK == 0
    fits &= x.dtype == FP8 and x_scales.dtype == torch.float32 and x_scales.shape == (tokens, blocks(width))
    fits &= ids.shape == weights.shape and len(ids) == tokens and weights.dtype == torch.float32
    if not fits or any(one.stride(1) != 1 for one in (x, ids, weights)):
        raise ValueError(
            f"expected x [T, H] in fp8 with float32 scales, ids and float32 weights [T, k], all but scales in rows, "
            f"gate_up [E, 2 * W, H] and down [E, H, W] with W a multiple of {BLOCK}, found {x.dtype} "
            f"{list(x.shape)}, {x_scales.dtype} {list(x_scales.shape)}, {list(ids.shape)}, {weights.dtype} "
            f"{list(weights.shape)}, {list(gate_up.shape)} and {list(down.shape)}, of the first and of ids and weights "
            f"strides {x.stride()}, {ids.stride()} and {weights.stride()}"
        )
    out = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device=x.device)
    routed = _Routed(x, x_scales, ids, weights, shared)
    prompt = tokens > FEW and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    library = deep_gemm(tokens, x.device) if prompt and hidden_size % BLOCK == 0 else None
    if library is not None:
        _by_groups(library, routed, experts, 0, out)
        return out
    sort = sort_many_pairs if prompt else sort_pairs
    cut = tiling(tokens)
    for begin in range(0, tokens, _MOST):
        part = routed.part(begin, min(begin + _MOST, tokens))
        order = sort(part.ids, experts.first, count, cut.m, part.shared)
        _by_tiles(part, order, experts, cut, begin, out)
    return out


@dataclass(frozen=True)
class _Routed:
    """Tokens and their experts, as `experts_fp8` takes them."""

    x: torch.Tensor
    x_scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: range | None

    def part(self, begin: int, end: int) -> "_Routed":
        of = slice(begin, end)
        shared = self.shared and range(max(0, self.shared.start - begin), max(0, min(end, self.shared.stop) - begin))
        return _Routed(self.x[of], self.x_scales[of], self.ids[of], self.weights[of], shared)

    def add_up(self, rows: torch.Tensor, order: Sorted, experts: SwiGluWeights, begin: int, out: torch.Tensor) -> None:
        """Write these tokens' weighted sums of rows, which `order` describes, into those of `out` from `begin` on."""
        chosen = len(experts.down) - (self.shared is not None)
        weighted_sum(rows, self.ids, self.weights, order, experts.first, chosen, begin, out)


def _by_tiles(
    routed: _Routed, order: Sorted, experts: SwiGluWeights, cut: Tiling, begin: int, out: torch.Tensor
) -> None:
    """Gather the rows of each tile as it is multiplied."""
    few, top_k = len(out) <= FEW, routed.ids.shape[1]
    both = _product(routed.x, routed.x_scales, order, top_k, experts.gate_up, experts.gate_up_scales, few, cut)
    inner, inner_scales = swiglu_quantise(both, experts.power_of_two, order.counts)
    rows = _product(inner, inner_scales, order, 0, experts.down, experts.down_scales, few, cut)
    routed.add_up(rows, order, experts, begin, out)


def _by_groups(library: DeepGemm, routed: _Routed, experts: SwiGluWeights, begin: int, out: torch.Tensor) -> None:
    """Gather all rows, and multiply them by whole matrices. Waits until the device has counted them."""
    tokens, top_k = routed.ids.shape
    order = sort_many_pairs(routed.ids, experts.first, len(experts.down), ROWS, routed.shared)
    counts = Download(order.counts)
    room = len(order.pairs) if tokens <= _MOST else _MOST * top_k
    values, scales = gather_rows(routed.x, routed.x_scales, order, top_k, room, ROWS)
    expert = order.tiles[: room // ROWS, 0].repeat_interleave(ROWS)
    count = ROWS * int(counts.poll()[1])  # while the device gathers
    if count > room:
        half = tokens // 2
        _by_groups(library, routed.part(0, half), experts, begin, out)
        _by_groups(library, routed.part(half, tokens), experts, begin + half, out)
        return
    num_blocks = routed.x_scales.shape[1]
    expert, scales = expert[:count], scales[: num_blocks * count].view(num_blocks, count).t()
    both = library.grouped_product(values[:count], scales, experts.gate_up, experts.gate_up_scales, expert)
    del values, scales
    inner = swiglu_quantise(both, experts.power_of_two)
    rows = library.grouped_product(*inner, experts.down, experts.down_scales, expert)
    routed.add_up(rows, order, experts, begin, out)


def tiling(tokens: int) -> Tiling:
    """Tiles that hold the rows of most experts at once, if some 8 of 256 are chosen."""
    if tokens <= 16:
        return Tiling(m=16, n=64, warps=4, stages=3, per_sm=6)
    if tokens <= 128:
        return Tiling(m=16, n=128, warps=4, stages=5, per_sm=2)
    if tokens <= 512:
        return Tiling(m=32, n=128, warps=4, stages=5, per_sm=2)
    if tokens <= FEW:
        return Tiling(m=64, n=128, warps=4, stages=3, per_sm=2, tokens_left=True)
    return Tiling(m=128, n=256, warps=8, stages=4, per_sm=1, tokens_left=True)


def _product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    order: Sorted,
    top_k: int,
    weight: torch.Tensor,
    scales: torch.Tensor,
    few: bool,
    cut: Tiling,
) -> torch.Tensor:
    """Every row times the transpose of its expert's weight [E, N, K]: bfloat16 [P, N] or float32 [splits, P, N].

    top_k: the rows of x are tokens, which have top_k pairs each; 0: they are the rows themselves.
    """
    n, k = weight.shape[1:]
    pairs = len(order.pairs)
    run = max(_LEAST_RUN, triton.cdiv(blocks(k), _RUNS)) if few else blocks(k)
    splits = triton.cdiv(blocks(k), run) if pairs <= _SPLIT_PAIRS else 1
    shape, dtype = ((pairs, n), torch.bfloat16) if splits == 1 else ((splits, pairs, n), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if not pairs:
        return out
    tiles_n = triton.cdiv(n, cut.n)
    programs = properties(x.device).multi_processor_count * cut.per_sm if x.is_cuda else 4
    launch(
        _experts, (min(programs, len(order.tiles) * tiles_n * splits),), x.device,
        described(weight, cut.n), scales,
        x, x.stride(0), x_scales, *x_scales.stride(),
        order.pairs, order.table, out,
        pairs, n, k, blocks(n), blocks(k), run, top_k, splits,
        gathers=top_k > 0, shares=splits > 1, compiled=x.is_cuda, ragged=k % BLOCK != 0,
        folds=splits == 1 and run < blocks(k), tokens_left=cut.tokens_left,
        block_n=cut.n, block_m=cut.m, stages=cut.stages, unroll=cut.unroll,
        num_warps=cut.warps, maxnreg=cut.registers,
    )  # fmt: skip
    return out


_VARYING = ["x_scale_block_stride", "num_rows", "row_blocks", "num_blocks", "run", "top_k", "splits"]
"""Numbers that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=_VARYING)
def _experts(
    weight: tensor, scales: tensor,
    x: tensor, x_row_stride: tensor, x_scales: tensor, x_scale_row_stride: tensor, x_scale_block_stride: tensor,
    pairs: tensor, table: tensor, out: tensor,
    num_rows: tensor, n: tensor, k: tensor, row_blocks: tensor, num_blocks: tensor,
    run: tensor, top_k: tensor, splits: tensor,
    gathers: constexpr, shares: constexpr, compiled: constexpr, ragged: constexpr,
    folds: constexpr, tokens_left: constexpr,
    block_n: constexpr, block_m: constexpr, stages: constexpr, unroll: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """Some of the pieces, each block_n rows of a weight by a tile's rows, over one run of channels or all."""
    follow(chained)
    tiles_n = tl.cdiv(n, block_n)
    pieces = tl.load(table + 1) * tiles_n * splits
    # As many programs as have equally many pieces. While a few have one more, the others' share of bandwidth is unused.
    programs = tl.cdiv(pieces, tl.maximum(tl.cdiv(pieces, tl.num_programs(0)), 1))
    for number in range(tl.program_id(0), pieces if tl.program_id(0) < programs else 0, programs):
        # The last first: these are the shared expert's, which has most rows.
        piece = pieces - 1 - number
        split = piece % splits
        first_row = piece // splits % tiles_n * block_n
        tile = table + 4 * (1 + piece // (splits * tiles_n))
        expert = tl.load(tile)
        row = tl.load(tile + 1) + tl.arange(0, block_m)
        real = row < tl.load(tile + 2)
        x_row = tl.load(pairs + row, mask=real, other=0) // top_k if gathers else row
        scale_row = expert * row_blocks + first_row // _BLOCK
        if block_n > _BLOCK:
            next_row = tl.minimum(scale_row + 1, (expert + 1) * row_blocks - 1)
            first, second = multiply_wide(
                weight, expert * n + first_row,
                scales + scale_row.to(tl.int64) * num_blocks, scales + next_row.to(tl.int64) * num_blocks,
                x, x_row_stride, x_scales, x_scale_row_stride, x_scale_block_stride, x_row, real,
                num_blocks, k, compiled, ragged, block_m, stages,
            )  # fmt: skip
            _store(out, first, row, real, first_row, n, _BLOCK)
            _store(out, second, row, real, first_row + _BLOCK, n, _BLOCK)
        else:
            total = multiply(
                weight, expert * n + first_row, scales + scale_row.to(tl.int64) * num_blocks,
                x, x_row_stride, x_scales, x_scale_row_stride, x_scale_block_stride, x_row, real,
                split * run if shares else 0, tl.minimum(split * run + run, num_blocks) if shares else num_blocks,
                run, k,
                ragged, folds, tokens_left, block_n, block_m, stages, unroll,
            )  # fmt: skip
            _store(out, total, split * num_rows.to(tl.int64) + row, real, first_row, n, block_n)


@triton.jit
def _store(
    out: tensor, total: tensor, row: tensor, real: tensor, first_column: tensor, n: tensor,
    block_n: constexpr,
) -> None:  # fmt: skip
    """Store the real rows of a tile [rows, block_n]. Addresses are made here, after the loop that needs registers."""
    column = first_column + tl.arange(0, block_n)
    place = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & (column < n)[None, :])
