"""Rotary position embedding as a Triton kernel, which also puts the result beside what is not rotated."""

import torch
import triton
import triton.language as tl

_MAX_HEADS = 8
"""Heads per program."""


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    """What `model.rope.Rope` describes: [before | rotated x | after], each [N, heads, its width], rounded as there.

    cos, sin: [N, 1, rope_dim / 2]. Raises ValueError for tensors that do not fit together.
    """
    tokens, heads, rope_dim = x.shape
    front, back = (x[..., :0] if part is None else part for part in (before, after))
    inputs = (x, front, back)
    angles = (tokens, 1, rope_dim // 2)
    if any(part.shape[:2] != x.shape[:2] or part.dtype != x.dtype or part.stride(2) != 1 for part in inputs) or any(
        part.shape != angles or part.dtype != x.dtype or part.stride() != cos.stride() or part.stride(2) != 1
        for part in (cos, sin)
    ):
        raise ValueError(
            f"expected parts [{tokens}, {heads}, any] of {x.dtype} with contiguous rows and angles {angles}, found "
            f"{[(tuple(part.shape), part.dtype, part.stride()) for part in (*inputs, cos, sin)]}"
        )
    out = x.new_empty(tokens, heads, front.shape[2] + rope_dim + back.shape[2])
    block_heads = min(triton.next_power_of_2(heads), _MAX_HEADS)
    if tokens:
        with torch.cuda.device(x.device):
            _rotate[(tokens, triton.cdiv(heads, block_heads))](
                x,
                cos,
                sin,
                front,
                back,
                out,
                *x.stride()[:2],
                cos.stride(0),
                *front.stride()[:2],
                *back.stride()[:2],
                heads,
                rope_dim // 2,
                front.shape[2],
                back.shape[2],
                interleaved,
                block_heads,
                block_half=triton.next_power_of_2(rope_dim // 2),
                block_front=triton.next_power_of_2(max(1, front.shape[2])),
                block_back=triton.next_power_of_2(max(1, back.shape[2])),
            )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source: tl.tensor, target: tl.tensor, real_head: tl.tensor, width: tl.constexpr, block: tl.constexpr) -> None:
    """Rows of `width` elements. source, target: pointers [heads, 1] to where each begins."""
    column = tl.arange(0, block)[None, :]
    real = real_head[:, None] & (column < width)
    tl.store(target + column, tl.load(source + column, mask=real), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    front: tl.tensor,
    back: tl.tensor,
    out: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    angle_token: tl.tensor,
    front_token: tl.tensor,
    front_head: tl.tensor,
    back_token: tl.tensor,
    back_head: tl.tensor,
    heads: tl.constexpr,
    half: tl.constexpr,
    front_dim: tl.constexpr,
    back_dim: tl.constexpr,
    interleaved: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    block_front: tl.constexpr,
    block_back: tl.constexpr,
) -> None:
    """One token, some heads. Names with _token and _head: strides."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    real_head = head < heads
    pair = tl.arange(0, block_half)
    real = real_head[:, None] & (pair < half)[None, :]
    dtype = out.dtype.element_ty

    angle = token * angle_token + pair
    c = tl.load(cos + angle, mask=pair < half)[None, :].to(tl.float32)
    s = tl.load(sin + angle, mask=pair < half)[None, :].to(tl.float32)
    row = x + token * x_token + head[:, None] * x_head
    first = tl.load(row + (2 * pair if interleaved else pair)[None, :], mask=real).to(tl.float32)
    second = tl.load(row + (2 * pair + 1 if interleaved else half + pair)[None, :], mask=real).to(tl.float32)
    # Products are rounded before they are added, as torch rounds them.
    rotated_first = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    rotated_second = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)

    place = out + (token * heads + head[:, None]) * (front_dim + 2 * half + back_dim)
    tl.store(place + front_dim + pair[None, :], rotated_first, mask=real)
    tl.store(place + front_dim + half + pair[None, :], rotated_second, mask=real)
    if front_dim > 0:
        begin = front + token * front_token + head[:, None] * front_head
        _copy(begin, place, real_head, front_dim, block_front)
    if back_dim > 0:
        begin = back + token * back_token + head[:, None] * back_head
        _copy(begin, place + front_dim + 2 * half, real_head, back_dim, block_back)
