"""Rotary position embedding as a Triton kernel, which also copies the part that is not rotated."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.operands import Rope
from kernels.triton.launch import follow, launch

_MAX_HEADS = 8
"""Heads per program. With 32 a prompt's take 1.7 times as long."""


def rotate(
    x: torch.Tensor,
    beside: torch.Tensor,
    rope: Rope,
    *,
    interleaved: bool,
    beside_first: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.ops.Ops`; rounded once. out: where to write the result, if not into a new tensor.

    Raises ValueError for tensors that do not fit together.
    """
    cos, sin = rope.cos, rope.sin
    tokens, heads, rope_dim = x.shape
    half, width = rope_dim // 2, beside.shape[-1]
    if out is None:
        out = x.new_empty(tokens, heads, rope_dim + width)
    parts = (x, beside, cos, sin, out)
    fits = beside.shape[:2] == x.shape[:2] and cos.shape == sin.shape == (tokens, 1, half)
    fits &= out.shape == (tokens, heads, rope_dim + width)
    if not fits or any(part.stride(2) != 1 or part.dtype != x.dtype for part in parts):
        raise ValueError(
            f"expected x, beside and out [{tokens}, {heads}, any], cos and sin [{tokens}, 1, {half}], of {x.dtype} in "
            f"contiguous rows, found {[(tuple(part.shape), part.dtype, part.stride()) for part in parts]}"
        )
    block_heads = min(triton.next_power_of_2(heads), _MAX_HEADS)
    launch(
        _rotate, (tokens, triton.cdiv(heads, block_heads)), x.device,
        x, beside, cos, sin, out,
        *x.stride()[:2], *beside.stride()[:2], *out.stride()[:2], cos.stride(0), sin.stride(0),
        heads, half, width, interleaved, beside_first,
        block_heads, block_half=triton.next_power_of_2(half), block_width=triton.next_power_of_2(max(width, 1)),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x: tensor, beside: tensor, cos: tensor, sin: tensor, out: tensor,
    x_token: tensor, x_head: tensor, beside_token: tensor, beside_head: tensor, out_token: tensor, out_head: tensor,
    cos_token: tensor, sin_token: tensor,
    heads: constexpr, half: constexpr, width: constexpr, interleaved: constexpr, beside_first: constexpr,
    block_heads: constexpr, block_half: constexpr, block_width: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One token, some heads. Names with _token and _head: strides."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    pair, column = tl.arange(0, block_half)[None, :], tl.arange(0, block_width)[None, :]
    real, real_column = (head < heads) & (pair < half), (head < heads) & (column < width)
    row = out + token * out_token + head * out_head

    c = tl.load(cos + token * cos_token + pair, mask=pair < half).to(tl.float32)
    s = tl.load(sin + token * sin_token + pair, mask=pair < half).to(tl.float32)
    begin = x + token * x_token + head * x_head
    first = tl.load(begin + (2 * pair if interleaved else pair), mask=real).to(tl.float32)
    second = tl.load(begin + (2 * pair + 1 if interleaved else half + pair), mask=real).to(tl.float32)
    roped = row + (width if beside_first else 0) + pair
    tl.store(roped, first * c - second * s, mask=real)
    tl.store(roped + half, second * c + first * s, mask=real)

    passed = tl.load(beside + token * beside_token + head * beside_head + column, mask=real_column)
    tl.store(row + (0 if beside_first else 2 * half) + column, passed, mask=real_column)
