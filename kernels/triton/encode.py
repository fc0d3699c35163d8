"""fp8 KV is written by one kernel per item and one per index key: norm, rotary embedding, rotation, scales and bytes.

`kernels.kv_format` has the layouts, `kvcache.format` the rules. Only the bytes are rounded, and index keys and queries
to bfloat16, as they are in other formats, before they are multiplied by the Hadamard matrix.

A step calls these kernels for few tokens, so that the time is that of one program: its loads are all issued before any
arithmetic, and code is short, since a program fetches each of its instructions for itself.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.fp8 import LEAST_AMAX, MAX
from kernels.kv_format import SCALE_BYTES, SCALED_TOGETHER, Fp8Layout
from kernels.operands import IndexQueries, LayerNorm, RmsNorm, Rope
from kernels.triton.launch import MIN_TILE, follow, launch

_LARGEST = tl.constexpr(MAX)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_HEADS = 4
"""Per program, which is one warp."""


def encode_items(compressed: torch.Tensor, norm: RmsNorm, rope: Rope, layout: Fp8Layout) -> torch.Tensor:
    """The fp8 items of what `kv_a_proj_with_mqa` computed: RMSNorm of the latent, rotation of the key, bytes.

    compressed: [N, latent_dim + rope_dim] of any floating-point type, each row contiguous; pairs of the key are
    neighbours. Returns uint8 [N, item_bytes]. Raises ValueError for tensors that do not fit together.
    """
    tokens, latent_dim, rope_dim, cos, sin = len(compressed), layout.latent_dim, layout.rope_dim, rope.cos, rope.sin
    _check(compressed, latent_dim + rope_dim, cos, sin, rope_dim)
    stored = compressed.new_empty(tokens, layout.item_bytes, dtype=torch.uint8)
    launch(
        _encode_items, (tokens,), compressed.device,
        compressed, norm.weight, cos, sin,
        stored.view(torch.float8_e4m3fn), stored.view(torch.float32), stored.view(torch.bfloat16),
        compressed.stride(0), cos.stride(0), sin.stride(0), norm.eps,
        latent_dim, rope_dim, layout.item_bytes, layout.num_scales,
        together=SCALED_TOGETHER, block_scales=triton.next_power_of_2(layout.num_scales),
        block_rope=triton.next_power_of_2(rope_dim), num_warps=4,
    )  # fmt: skip
    return stored


def decode_items(stored: torch.Tensor, rows: torch.Tensor, layout: Fp8Layout) -> torch.Tensor:
    """The items at rows, int64 [N], of a pool, uint8 [num_rows, item_bytes]: bfloat16 [N, latent_dim + rope_dim]."""
    items = torch.empty(len(rows), layout.latent_dim + layout.rope_dim, dtype=torch.bfloat16, device=stored.device)
    launch(
        _decode_items, (len(rows),), stored.device,
        stored.view(torch.float8_e4m3fn), stored.view(torch.float32), stored.view(torch.bfloat16), rows, items,
        layout.latent_dim, layout.rope_dim, layout.item_bytes, layout.num_scales,
        together=SCALED_TOGETHER, block_scales=triton.next_power_of_2(layout.num_scales),
        block_rope=triton.next_power_of_2(layout.rope_dim), num_warps=1,
    )  # fmt: skip
    return items


def encode_index_keys(
    projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool, layout: Fp8Layout
) -> torch.Tensor:
    """The fp8 index keys of what `wk` computed: LayerNorm, rotary embedding of the first elements, Hadamard, bytes.

    projected: [N, index_dim] of any floating-point type, each row contiguous. interleaved: pairs are neighbours (GLM)
    rather than half of rope_dim apart. Returns uint8 [N, index_key_bytes].
    Raises ValueError for tensors that do not fit together, or an index_dim below 16.
    """
    tokens, dim, rope_dim, cos, sin = len(projected), layout.index_dim, layout.rope_dim, rope.cos, rope.sin
    _check(projected, dim, cos, sin, rope_dim)
    if dim < MIN_TILE or rope_dim > dim:
        raise ValueError(f"expected {rope_dim} or more of at least 16 elements, found {dim}")
    stored = projected.new_empty(tokens, layout.index_key_bytes, dtype=torch.uint8)
    launch(
        _encode_index_keys, (tokens,), projected.device,
        projected, norm.weight, norm.bias, cos, sin,
        stored.view(torch.float8_e4m3fn), stored.view(torch.float32),
        projected.stride(0), cos.stride(0), sin.stride(0), norm.eps, dim**-0.5,
        dim, rope_dim, interleaved, num_warps=1,
    )  # fmt: skip
    return stored


def encode_index_queries(index: IndexQueries) -> IndexQueries:
    """Queries in fp8, times the Hadamard matrix: what `index_scores` multiplies fp8 keys by.

    Each head has a scale, which its weight is multiplied by: scores are those of the queries that were given, but for
    rounding. The parts of head weights are added up. index_dim must be a power of two from 16.
    """
    tokens, heads, dim = index.queries.shape
    queries = torch.empty_like(index.queries, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    sums = index.weight_sums
    weights = sums.parts.new_empty(tokens, heads)
    if sums.parts.stride(-1) != 1:
        raise ValueError(f"expected contiguous rows of head weights, found strides {sums.parts.stride()}")
    launch(
        _encode_index_queries, (tokens, triton.cdiv(heads, _HEADS)), queries.device,
        index.queries.contiguous(), sums.parts, queries, weights,
        sums.parts.stride(0), sums.parts.stride(1), sums.scale, dim**-0.5,
        len(sums.parts), heads, dim,
        block_parts=triton.next_power_of_2(len(sums.parts)), block_heads=_HEADS, num_warps=1,
    )  # fmt: skip
    return IndexQueries.of(queries, weights)


def _check(x: torch.Tensor, width: int, cos: torch.Tensor, sin: torch.Tensor, rope_dim: int) -> None:
    angles = (len(x), 1, rope_dim // 2)
    if x.shape[1:] != (width,) or cos.shape != angles or sin.shape != angles:
        raise ValueError(
            f"expected [N, {width}] and angles [N, 1, {rope_dim // 2}], found {tuple(x.shape)}, {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    if any(part.stride(-1) != 1 for part in (x, cos, sin)):
        raise ValueError("expected contiguous rows")


@triton.jit
def _divided(x: tensor, by: tensor, reciprocal: tensor) -> tensor:
    """x / by, rounded as division does it (Markstein, IBM J. Res. Dev. 34(1), 1990), without the branches that division
    has for numbers that no scale is. reciprocal: of `by`, rounded to the nearest number."""
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, by, x), reciprocal, quotient)


@triton.jit
def _scale(amax: tensor) -> tensor:
    return _divided(tl.maximum(amax, _LEAST_AMAX), _LARGEST, 1.0 / _LARGEST)


@triton.jit
def _up_to_power_of_two(scale: tensor) -> tensor:
    """For finite ones: a mantissa that is not zero carries into the exponent."""
    return ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _fp8(x: tensor, scale: tensor) -> tensor:
    """x / scale, which is at most the largest number. A NaN stays one. scale: as many as x, or one for each row."""
    about = 1.0 / scale
    reciprocal = tl.fma(about, tl.fma(-about, scale, 1.0), about)
    return _divided(x, scale, reciprocal).to(tl.float8e4nv)


@triton.jit
def _hadamard(x: tensor, rows: constexpr, dim: constexpr) -> tensor:
    """x, float32 [rows, dim], times Sylvester's matrix, which has -1 where row and column have an odd number of one
    bits in common. A fast Walsh-Hadamard transform whose stages are all the same (Pease, J. ACM 15(2), 1968): sums of
    neighbours become the first half, and differences the second."""
    stages: tl.constexpr = dim.bit_length() - 1
    for _ in tl.static_range(stages):
        first, second = tl.split(tl.reshape(x, [rows, dim // 2, 2]))
        x = tl.reshape(tl.trans(tl.join(first + second, first - second), 0, 2, 1), [rows, dim])
    return x


@triton.jit
def _encode_items(
    compressed: tensor, weight: tensor, cos: tensor, sin: tensor,
    latents: tensor, scales: tensor, ropes: tensor,
    token_stride: tensor, cos_stride: tensor, sin_stride: tensor, eps: tensor,
    latent_dim: constexpr, rope_dim: constexpr, item_bytes: constexpr, num_scales: constexpr,
    together: constexpr, block_scales: constexpr, block_rope: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One token. latents, scales, ropes: the same bytes as numbers of three types."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block_scales)
    column = group[:, None] * together + tl.arange(0, together)[None, :]
    real = column < latent_dim
    x = tl.load(compressed + token * token_stride + column, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.sum(tl.sum(x * x, 1), 0) / latent_dim
    x = x * (1.0 / tl.sqrt_rn(mean_square + eps)) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    scale = _up_to_power_of_two(_scale(tl.max(tl.abs(x), 1)))
    # Of a token that is no number each scale is none. `max` would leave that out.
    scale = tl.where(mean_square < float("inf"), scale, float("nan"))
    tl.store(latents + token * item_bytes + column, _fp8(x, scale[:, None]), mask=real)
    tl.store(
        scales + token * (item_bytes // _SCALE_BYTES) + latent_dim // _SCALE_BYTES + group,
        scale,
        mask=group < num_scales,
    )

    half: tl.constexpr = rope_dim // 2
    place = tl.arange(0, block_rope)
    pair, is_first, real_place = place % half, place < half, place < rope_dim
    key = compressed + token * token_stride + latent_dim + 2 * pair
    first = tl.load(key, mask=real_place, other=0.0).to(tl.float32)
    second = tl.load(key + 1, mask=real_place, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_stride + pair, mask=real_place, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + pair, mask=real_place, other=0.0).to(tl.float32)
    roped = tl.where(is_first, first * c - second * s, second * c + first * s)
    begin: tl.constexpr = (latent_dim + _SCALE_BYTES * num_scales) // 2
    tl.store(ropes + token * (item_bytes // 2) + begin + place, roped.to(tl.bfloat16), mask=real_place)


@triton.jit
def _decode_items(
    latents: tensor, scales: tensor, ropes: tensor, rows: tensor, items: tensor,
    latent_dim: constexpr, rope_dim: constexpr, item_bytes: constexpr, num_scales: constexpr,
    together: constexpr, block_scales: constexpr, block_rope: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One item. latents, scales, ropes: the same bytes as numbers of three types."""
    follow(chained)
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    group, place = tl.arange(0, block_scales), tl.arange(0, block_rope)
    column = group[:, None] * together + tl.arange(0, together)[None, :]
    real, real_place = column < latent_dim, place < rope_dim
    latent = tl.load(latents + row * item_bytes + column, mask=real, other=0.0).to(tl.float32)
    first_scale: tl.constexpr = latent_dim // _SCALE_BYTES
    scale = tl.load(
        scales + row * (item_bytes // _SCALE_BYTES) + first_scale + group, mask=group < num_scales, other=0.0
    )
    first_rope: tl.constexpr = (latent_dim + _SCALE_BYTES * num_scales) // 2
    roped = tl.load(ropes + row * (item_bytes // 2) + first_rope + place, mask=real_place, other=0.0)
    item = items + number * (latent_dim + rope_dim)
    tl.store(item + column, (latent * scale[:, None]).to(tl.bfloat16), mask=real)
    tl.store(item + latent_dim + place, roped, mask=real_place)


@triton.jit
def _encode_index_keys(
    projected: tensor, weight: tensor, bias: tensor, cos: tensor, sin: tensor, keys: tensor, scales: tensor,
    token_stride: tensor, cos_stride: tensor, sin_stride: tensor, eps: tensor, orthonormal: tensor,
    dim: constexpr, rope_dim: constexpr, interleaved: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """One token. keys, scales: the same bytes as numbers of two types."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = rope_dim // 2
    column = tl.arange(0, dim)
    pair = column % half
    first = 2 * pair if interleaved else pair
    second = first + 1 if interleaved else first + half
    # What each column of the result is made of: its own member of a pair and the other one.
    own = tl.where(column < half, first, tl.where(column < rope_dim, second, column))
    other = tl.where(column < half, second, first)
    is_rope = column < rope_dim

    row = projected + token * token_stride
    # Volatile, so that the compiler keeps their order: it would put most of them after the sum of x, which waits.
    x_weight, x_bias = tl.load(weight + own, volatile=True), tl.load(bias + own, volatile=True)
    y_weight, y_bias = tl.load(weight + other, volatile=True), tl.load(bias + other, volatile=True)
    c = tl.load(cos + token * cos_stride + pair, volatile=True).to(tl.float32)
    s = tl.load(sin + token * sin_stride + pair, volatile=True).to(tl.float32)
    y = tl.load(row + other, volatile=True).to(tl.float32)
    x = tl.load(row + own, volatile=True).to(tl.float32)

    mean = tl.sum(x, 0) / dim  # `own` has every column once
    variance = tl.sum((x - mean) * (x - mean), 0) / dim
    factor = tl.rsqrt(variance + eps)
    x = (x - mean) * factor * x_weight.to(tl.float32) + x_bias.to(tl.float32)
    y = (y - mean) * factor * y_weight.to(tl.float32) + y_bias.to(tl.float32)
    x = tl.where(is_rope, x * c + tl.where(column < half, -y, y) * s, x)

    x = tl.reshape(x.to(tl.bfloat16).to(tl.float32), [1, dim])
    rotated = tl.reshape(_hadamard(x, 1, dim), [dim]) * orthonormal
    scale = _scale(tl.max(tl.abs(rotated), 0))
    tl.store(keys + token * (dim + _SCALE_BYTES) + column, _fp8(rotated, scale))
    tl.store(scales + token * (dim // _SCALE_BYTES + 1) + dim // _SCALE_BYTES, scale)


@triton.jit
def _encode_index_queries(
    queries: tensor, weight_parts: tensor, out: tensor, weights: tensor,
    part_stride: tensor, token_stride: tensor, weight_scale: tensor, orthonormal: tensor,
    num_parts: constexpr, heads: constexpr, dim: constexpr,
    block_parts: constexpr, block_heads: constexpr, chained: constexpr,
) -> None:  # fmt: skip
    """Some heads of one token."""
    follow(chained)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    real = head < heads
    at = (token * heads + head)[:, None] * dim + tl.arange(0, dim)[None, :]
    x = tl.load(queries + at, mask=real[:, None], other=0.0)
    part = tl.arange(0, block_parts)
    weight_at = weight_parts + part[:, None].to(tl.int64) * part_stride + token * token_stride + head[None, :]
    weight = tl.load(weight_at, mask=(part < num_parts)[:, None] & real[None, :], other=0.0)
    rotated = _hadamard(x.to(tl.bfloat16).to(tl.float32), block_heads, dim) * orthonormal
    scale = _scale(tl.max(tl.abs(rotated), 1))
    tl.store(out + at, _fp8(rotated, scale[:, None]), mask=real[:, None])
    tl.store(weights + token * heads + head, tl.sum(weight, 0) * weight_scale * scale, mask=real)
