"""The threshold of top-k and top-p among a whole vocabulary, as a Triton kernel.

One program per row, which returns at once if the row is decided. Scaled logits are at most 0, so the bits of their
magnitudes, read as integers, sort as the magnitudes do. Both thresholds are found by bisection over these bits, in 31
passes over the row each. That is slow (some 1 ms) and rare.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.operands import Threshold
from kernels.torch_ops import CANDIDATES, among_likeliest
from kernels.triton.launch import on

_BLOCK = 8192
_INFINITY_BITS = tl.constexpr(0x7F800000)


def find_threshold(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Threshold:
    """See `kernels.ops.Ops`. The kernel runs for decided rows, too, so that the host need not know which these are."""
    threshold, decided = among_likeliest(scaled, top_k, top_p, CANDIDATES)
    rows, vocab = scaled.shape
    if vocab > CANDIDATES:
        given = [tensor.contiguous() for tensor in (scaled, top_k, top_p, decided)]
        with on(scaled.device):
            _find[(rows,)](*given, threshold.least, threshold.equals, vocab, block=_BLOCK, num_warps=16)
    return threshold


@triton.jit
def _magnitudes(scaled: tensor, row: tensor, first: tensor, vocab: tensor, block: constexpr) -> tensor:
    """The bits of the magnitudes of a block of a row, as integers; beyond the row infinity's."""
    column = first + tl.arange(0, block)
    values = tl.load(scaled + row * vocab + column, mask=column < vocab, other=float("-inf"))
    return (-values).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _count(scaled: tensor, row: tensor, bits: tensor, vocab: tensor, block: constexpr) -> tensor:
    """How many tokens of a row have at most these bits."""
    count = tl.zeros([], tl.int32)
    for first in range(0, vocab, block):
        count += tl.sum((_magnitudes(scaled, row, first, vocab, block) <= bits).to(tl.int32))
    return count


@triton.jit
def _mass(scaled: tensor, row: tensor, bits: tensor, vocab: tensor, block: constexpr) -> tensor:
    """The sum of the weights of the tokens of a row that have at most these bits."""
    mass = tl.zeros([], tl.float64)
    for first in range(0, vocab, block):
        found = _magnitudes(scaled, row, first, vocab, block)
        weights = tl.exp(-found.to(tl.float32, bitcast=True)).to(tl.float64)
        mass += tl.sum(tl.where(found <= bits, weights, 0.0))
    return mass


@triton.jit
def _find(
    scaled: tensor, top_k: tensor, top_p: tensor, decided: tensor, least: tensor, equals: tensor, vocab: tensor,
    block: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(decided + row) == 0:
        k = tl.load(top_k + row).to(tl.int32)
        p = tl.load(top_p + row)
        # The least bits within which there are k tokens.
        low = tl.zeros([], tl.int32)
        high = tl.zeros([], tl.int32) + _INFINITY_BITS
        while low < high:
            middle = low + (high - low) // 2
            if _count(scaled, row, middle, vocab, block) >= k:
                high = middle
            else:
                low = middle + 1
        room = k - _count(scaled, row, low - 1, vocab, block)
        if p < 1:
            weight = tl.exp(-low.to(tl.float32, bitcast=True)).to(tl.float64)
            wanted = p * (_mass(scaled, row, low - 1, vocab, block) + room * weight)
            last = low
            # The least bits within which the wanted mass is, of those that top_k leaves.
            low = tl.zeros([], tl.int32)
            high = last
            while low < high:
                middle = low + (high - low) // 2
                if _mass(scaled, row, middle, vocab, block) >= wanted:
                    high = middle
                else:
                    low = middle + 1
            weight = tl.exp(-low.to(tl.float32, bitcast=True)).to(tl.float64)
            missing = (wanted - _mass(scaled, row, low - 1, vocab, block)) / weight
            needed = tl.maximum(tl.ceil(missing), 1.0).to(tl.int32)
            room = tl.where(low == last, tl.minimum(needed, room), needed)
        tl.store(least + row, -low.to(tl.float32, bitcast=True))
        tl.store(equals + row, room.to(tl.int64))
