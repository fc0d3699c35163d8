"""fp8 KV is written by one kernel per item and one per index key: norm, rotary embedding, rotation, scales and bytes.

The layouts and rules are those of `hisparse.fp8_format`. Nothing is rounded before the bytes are, but index keys and
queries once to bfloat16 before they are multiplied by the Hadamard matrix, which is a product on tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hisparse.fp8_format import LARGEST, LEAST_AMAX, SCALED_TOGETHER, Fp8Format
from model.backends.device import MIN_TILE
from model.indexer import IndexQueries

_LARGEST = tl.constexpr(LARGEST)
_LEAST_AMAX = tl.constexpr(LEAST_AMAX)
_MAX_HEADS = 64
"""Heads per program."""


class Norm(NamedTuple):
    """The parameters of a norm. weight: [dim]. bias: [dim], None for RMSNorm. eps: added to the variance."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


def encode_items(
    compressed: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, kv_format: Fp8Format
) -> torch.Tensor:
    """The fp8 items of what `kv_a_proj_with_mqa` computed: RMSNorm of the latent, rotation of the key, bytes.

    compressed: [N, latent_dim + rope_dim] of any floating-point type, each row contiguous; pairs of the key are
    neighbours. cos, sin: [N, 1, rope_dim / 2] of the pairs' angles, as in `model.rope.Rope`. Returns uint8
    [N, item_bytes]. Raises ValueError for tensors that do not fit together.
    """
    tokens, latent_dim, rope_dim = len(compressed), kv_format.latent_dim, kv_format.rope_dim
    _check(compressed, latent_dim + rope_dim, cos, sin, rope_dim)
    stored = compressed.new_empty(tokens, kv_format.item_bytes, dtype=torch.uint8)
    if tokens:
        with torch.cuda.device(compressed.device):
            _encode_items[(tokens,)](
                compressed,
                norm.weight,
                cos,
                sin,
                stored.view(torch.float8_e4m3fn),
                stored.view(torch.float32),
                stored.view(torch.bfloat16),
                compressed.stride(0),
                cos.stride(0),
                sin.stride(0),
                norm.eps,
                latent_dim,
                rope_dim,
                kv_format.item_bytes,
                kv_format.num_scales,
                together=SCALED_TOGETHER,
                block_scales=triton.next_power_of_2(kv_format.num_scales),
                block_rope=triton.next_power_of_2(rope_dim),
                num_warps=4,
            )
    return stored


def encode_index_keys(
    projected: torch.Tensor, norm: Norm, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, kv_format: Fp8Format
) -> torch.Tensor:
    """The fp8 index keys of what `wk` computed: LayerNorm, rotary embedding of the first elements, Hadamard, bytes.

    projected: [N, index_dim] of any floating-point type, each row contiguous. cos, sin: as in `encode_items`.
    interleaved: pairs are neighbours (GLM) rather than half of rope_dim apart. Returns uint8 [N, index_key_bytes].
    Raises ValueError for tensors that do not fit together, or an index_dim below 16.
    """
    tokens, dim, rope_dim = len(projected), kv_format.index_dim, kv_format.rope_dim
    _check(projected, dim, cos, sin, rope_dim)
    if norm.bias is None or dim < MIN_TILE or rope_dim > dim:
        raise ValueError(
            f"expected a LayerNorm with a bias and {rope_dim} or more of at least 16 elements, found {dim}"
        )
    stored = projected.new_empty(tokens, kv_format.index_key_bytes, dtype=torch.uint8)
    if tokens:
        with torch.cuda.device(projected.device):
            _encode_index_keys[(triton.cdiv(tokens, MIN_TILE),)](
                projected,
                norm.weight,
                norm.bias,
                cos,
                sin,
                stored.view(torch.float8_e4m3fn),
                stored.view(torch.float32),
                tokens,
                projected.stride(0),
                cos.stride(0),
                sin.stride(0),
                norm.eps,
                dim**-0.5,
                dim,
                rope_dim,
                interleaved,
                block_tokens=MIN_TILE,
                num_warps=4,
            )
    return stored


def encode_index_queries(index: IndexQueries) -> IndexQueries:
    """Queries in fp8, times the Hadamard matrix: what `triton_index` multiplies fp8 keys by.

    Each head has a scale, which its weight is multiplied by: scores are those of the queries that were given, but for
    rounding. index_dim must be a power of two from 16.
    """
    tokens, heads, dim = index.queries.shape
    queries = torch.empty_like(index.queries, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    weights = torch.empty_like(index.head_weights, memory_format=torch.contiguous_format)
    block_heads = min(max(MIN_TILE, triton.next_power_of_2(heads)), _MAX_HEADS)
    if tokens:
        with torch.cuda.device(queries.device):
            _encode_index_queries[(tokens, triton.cdiv(heads, block_heads))](
                index.queries.contiguous(),
                index.head_weights.contiguous(),
                queries,
                weights,
                dim**-0.5,
                heads,
                dim,
                block_heads=block_heads,
                num_warps=4,
            )
    return IndexQueries(queries, weights)


def _check(x: torch.Tensor, width: int, cos: torch.Tensor, sin: torch.Tensor, rope_dim: int) -> None:
    angles = (len(x), 1, rope_dim // 2)
    if x.shape[1:] != (width,) or cos.shape != angles or sin.shape != angles:
        raise ValueError(
            f"expected [N, {width}] and angles [N, 1, {rope_dim // 2}], found {tuple(x.shape)}, {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    if any(part.stride(-1) != 1 for part in (x, cos, sin)):
        raise ValueError("expected contiguous rows")


@triton.jit  # type: ignore[untyped-decorator]
def _scale(amax: tl.tensor) -> tl.tensor:
    return tl.div_rn(tl.maximum(amax, _LEAST_AMAX), _LARGEST)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    # A NaN stays one: it is neither above nor below.
    x = tl.div_rn(x, scale)
    x = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
    return x.to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def _hadamard(dim: tl.constexpr) -> tl.tensor:
    """Sylvester's matrix, bfloat16 [dim, dim]: -1 where row and column have an odd number of one bits in common."""
    common = tl.arange(0, dim)[:, None] & tl.arange(0, dim)[None, :]
    common ^= common >> 8
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_items(
    compressed: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    latents: tl.tensor,
    scales: tl.tensor,
    ropes: tl.tensor,
    token_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    eps: tl.tensor,
    latent_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    item_bytes: tl.constexpr,
    num_scales: tl.constexpr,
    together: tl.constexpr,
    block_scales: tl.constexpr,
    block_rope: tl.constexpr,
) -> None:
    """One token. latents, scales, ropes: the same bytes as numbers of three types."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block_scales)
    column = group[:, None] * together + tl.arange(0, together)[None, :]
    real = column < latent_dim
    x = tl.load(compressed + token * token_stride + column, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.sum(tl.sum(x * x, 1), 0) / latent_dim
    x = x * (1.0 / tl.sqrt_rn(mean_square + eps)) * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(x), 1))
    tl.store(latents + token * item_bytes + column, _fp8(x, scale[:, None]), mask=real)
    tl.store(scales + token * (item_bytes // 4) + latent_dim // 4 + group, scale, mask=group < num_scales)

    half: tl.constexpr = rope_dim // 2
    place = tl.arange(0, block_rope)
    pair, is_first, real_place = place % half, place < half, place < rope_dim
    key = compressed + token * token_stride + latent_dim + 2 * pair
    first = tl.load(key, mask=real_place, other=0.0).to(tl.float32)
    second = tl.load(key + 1, mask=real_place, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_stride + pair, mask=real_place, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + pair, mask=real_place, other=0.0).to(tl.float32)
    roped = tl.where(is_first, first * c - second * s, second * c + first * s)
    begin: tl.constexpr = (latent_dim + 4 * num_scales) // 2
    tl.store(ropes + token * (item_bytes // 2) + begin + place, roped.to(tl.bfloat16), mask=real_place)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _encode_index_keys(
    projected: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    eps: tl.tensor,
    orthonormal: tl.tensor,
    dim: tl.constexpr,
    rope_dim: tl.constexpr,
    interleaved: tl.constexpr,
    block_tokens: tl.constexpr,
) -> None:
    """Some tokens. keys, scales: the same bytes as numbers of two types."""
    token = (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64)
    real = (token < tokens)[:, None]
    half: tl.constexpr = rope_dim // 2
    column = tl.arange(0, dim)
    pair = column % half
    first = 2 * pair if interleaved else pair
    second = first + 1 if interleaved else first + half
    # What each column of the result is made of: its own member of a pair and the other one.
    own = tl.where(column < half, first, tl.where(column < rope_dim, second, column))
    other = tl.where(column < half, second, first)

    row = projected + token[:, None] * token_stride
    x = tl.load(row + own[None, :], mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / dim  # `own` has every column once
    variance = tl.sum((x - mean[:, None]) * (x - mean[:, None]), 1) / dim
    factor = 1.0 / tl.sqrt_rn(variance + eps)
    x = (x - mean[:, None]) * factor[:, None] * tl.load(weight + own).to(tl.float32)[None, :]
    x += tl.load(bias + own).to(tl.float32)[None, :]
    is_rope = (column < rope_dim)[None, :]
    y = tl.load(row + other[None, :], mask=real & is_rope, other=0.0).to(tl.float32)
    y = (y - mean[:, None]) * factor[:, None] * tl.load(weight + other).to(tl.float32)[None, :]
    y += tl.load(bias + other).to(tl.float32)[None, :]
    c = tl.load(cos + token[:, None] * cos_stride + pair[None, :], mask=real & is_rope, other=0.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * sin_stride + pair[None, :], mask=real & is_rope, other=0.0).to(tl.float32)
    x = tl.where(is_rope, x * c + tl.where((column < half)[None, :], -y, y) * s, x)

    rotated = tl.dot(x.to(tl.bfloat16), _hadamard(dim)) * orthonormal
    scale = _scale(tl.max(tl.abs(rotated), 1))
    tl.store(keys + token[:, None] * (dim + 4) + column[None, :], _fp8(rotated, scale[:, None]), mask=real)
    tl.store(scales + token * (dim // 4 + 1) + dim // 4, scale, mask=token < tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_index_queries(
    queries: tl.tensor,
    head_weights: tl.tensor,
    out: tl.tensor,
    weights: tl.tensor,
    orthonormal: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block_heads: tl.constexpr,
) -> None:
    """Some heads of one token."""
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    place = tl.program_id(0).to(tl.int64) * heads + head
    real = head < heads
    at = place[:, None] * dim + tl.arange(0, dim)[None, :]
    x = tl.load(queries + at, mask=real[:, None], other=0.0).to(tl.bfloat16)
    rotated = tl.dot(x, _hadamard(dim)) * orthonormal
    scale = _scale(tl.max(tl.abs(rotated), 1))
    tl.store(out + at, _fp8(rotated, scale[:, None]), mask=real[:, None])
    tl.store(weights + place, tl.load(head_weights + place, mask=real, other=0.0) * scale, mask=real)
