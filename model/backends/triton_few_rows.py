"""Products of few tokens with a weight of few rows, summed in float32: routers and the heads' weights of indexers.

A weight of 64 to 256 rows is read in about a microsecond, if all multiprocessors read at once. So each program
multiplies some rows by a run of channels, which it reads with loads that are all in flight together, and writes partial
sums. The order of additions depends on the shape of the weight alone.

Factors are multiplied by tensor cores in bfloat16, whose products are exact in float32. A weight in float32 is cut into
three bfloat16 numbers that together are the same number, as far as the smallest of them is not below what bfloat16 has.
"""

import torch
import triton
import triton.language as tl

from model.backends.device import MIN_TILE
from model.backends.triton_chain import chained, follow
from model.backends.triton_fp8 import on

_CHANNELS = 256
"""Per program: 28 runs of a hidden size of 7168, and with it as many partial sums."""
_STEP = 128
"""Channels that are copied to shared memory together."""
_MOST_ROWS = 64
_ROW_TILES = 4
"""As many as a weight has rows for, so that runs times tiles come near the number of multiprocessors."""
_MOST_TOKENS = 64
"""Per program."""


def partial_products(
    x: torch.Tensor, weight: torch.Tensor, block_rows: int | None = None, block_channels: int = _CHANNELS
) -> torch.Tensor:
    """Parts of x times the transpose of the weight, float32 [parts, N, rows]: their sum over the parts is the product.

    x: bfloat16 [N, channels], each row contiguous. weight: bfloat16 or float32 [rows, channels], contiguous.
    block_rows, block_channels: powers of two from 16, of one program, which change the order of additions. Raises
    ValueError for other tensors.
    """
    (tokens, channels), rows = x.shape, len(weight)
    if weight.shape != (rows, channels) or x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"expected contiguous rows of {channels} channels, found {tuple(weight.shape)} of strides "
            f"{weight.stride()} and x of strides {x.stride()}"
        )
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"expected bfloat16 times bfloat16 or float32, found {x.dtype} and {weight.dtype}")
    block_rows = block_rows or min(_MOST_ROWS, max(MIN_TILE, triton.next_power_of_2(triton.cdiv(rows, _ROW_TILES))))
    block_tokens = min(_MOST_TOKENS, max(MIN_TILE, triton.next_power_of_2(tokens)))
    runs = triton.cdiv(channels, block_channels)
    parts = torch.empty((runs, tokens, rows), dtype=torch.float32, device=x.device)
    if tokens:
        with on(x.device):
            _partial_products[(triton.cdiv(rows, block_rows), runs, triton.cdiv(tokens, block_tokens))](
                x,
                weight,
                parts,
                tokens,
                x.stride(0),
                rows,
                channels,
                block_rows=block_rows,
                block_channels=block_channels,
                block_tokens=block_tokens,
                step=min(_STEP, block_channels),
                num_warps=4,
                **chained(x.device),
            )
    return parts


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _partial_products(
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    token_stride: tl.tensor,
    rows: tl.constexpr,
    channels: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    block_tokens: tl.constexpr,
    step: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Some rows of the weight, one run of channels, some tokens. Rows come first, since tokens may be fewer than the
    tensor cores' tiles, whose shape must not depend on how many there are."""
    follow(chained)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    token = tl.program_id(2) * block_tokens + tl.arange(0, block_tokens)
    total = tl.zeros([block_rows, block_tokens], tl.float32)
    small = tl.zeros([block_rows, block_tokens], tl.float32)
    # One stage more than turns: the copies of all turns are on their way before the first is waited for.
    for begin in tl.range(0, block_channels, step, num_stages=block_channels // step + 1):
        channel = tl.program_id(1) * block_channels + begin + tl.arange(0, step)[None, :]
        here = (row < rows)[:, None] & (channel < channels)
        factor = tl.load(weight + row[:, None] * channels + channel, mask=here, other=0.0)
        here = (token < tokens)[:, None] & (channel < channels)
        other = tl.trans(tl.load(x + token[:, None] * token_stride + channel, mask=here, other=0.0))
        if factor.dtype == tl.float32:
            first = factor.to(tl.bfloat16)
            rest = factor - first.to(tl.float32)
            second = rest.to(tl.bfloat16)
            third = (rest - second.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(first, other, total)
            # Apart, since tensor cores cut off what they add to a sum below its last bit.
            small = tl.dot(third, other, tl.dot(second, other, small))
        else:
            total = tl.dot(factor, other, total)
    place = parts + (tl.program_id(1) * tokens + token)[None, :] * rows + row[:, None]
    tl.store(place, total + small, mask=(token < tokens)[None, :] & (row < rows)[:, None])
