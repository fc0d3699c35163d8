"""Block-fp8 weights in plain torch: what the published numbers mean, and the reference of the kernels.

A weight is float8_e4m3fn [..., N, K] with float32 scales [..., ceil(N/128), ceil(K/128)]; an element is the product of
its number and the scale of its block of 128 x 128 (`weight_scale_inv`; DeepSeek-V3, arXiv:2412.19437, section 3.3).
Blocks are counted from the first row and column, so the last block of either direction may be narrower.

Activations are quantised per token and 128 channels when they are used. The rules are those of `act_quant` in
inference/kernel.py of DeepSeek-V3.2-Exp: scale = max(amax, 1e-4) / 448, and for checkpoints with `scale_fmt: ue8m0`
that rounded up to a power of two (`power_of_two`). A product is summed in float32 for each 128 channels, multiplied by
both scales, summed in float32, and rounded once.
"""

import torch
import torch.nn.functional as F

from kernels.operands import SwiGluWeights

BLOCK = 128
"""Channels, and rows of a weight, that share a scale."""

MAX = 448.0
"""The largest float8_e4m3fn."""

LEAST_AMAX = 1e-4
"""The least magnitude that a scale is made for, so that zeros have a scale."""

FP8 = torch.float8_e4m3fn
_LEAST_WEIGHT = 1e-35


def blocks(size: int) -> int:
    """How many blocks `size` rows or channels begin."""
    return -(-size // BLOCK)


def _scales(amax: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """The scales of blocks whose largest magnitudes are `amax`, float32."""
    scales = amax * (1 / MAX)
    if not power_of_two:
        return scales
    # A mantissa that is not zero carries into the exponent.
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantise_weight(weight: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a weight [..., N, K] of any floating type.

    A block of small numbers keeps its precision: scales have no least value but that of normal float32 numbers.
    """
    *batch, n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    tiles = padded.view(*batch, blocks(n), BLOCK, blocks(k), BLOCK)
    scales = _scales(tiles.abs().amax((-3, -1)).clamp(min=_LEAST_WEIGHT), power_of_two)
    values = tiles / scales[..., :, None, :, None]
    return values.view(padded.shape)[..., :n, :k].contiguous().to(FP8), scales


def dequantise(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [..., N, K] that values and scales stand for, computed in float32 and rounded once to `dtype`.

    Raises ValueError if the scales are not those of the weight's blocks.
    """
    check_scales(weight, scales)
    n, k = weight.shape[-2:]
    by_row = scales.repeat_interleave(BLOCK, -2)[..., :n, :]
    return (weight.float() * by_row.repeat_interleave(BLOCK, -1)[..., :k]).to(dtype)


def check_scales(weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises ValueError unless `scales` are float32 and one for each block of `weight`."""
    expected = (*weight.shape[:-2], *map(blocks, weight.shape[-2:]))
    if weight.dtype != FP8 or scales.dtype != torch.float32 or scales.shape != expected:
        raise ValueError(
            f"expected a weight of {FP8} with float32 scales {list(expected)} for its shape {list(weight.shape)}, "
            f"found {weight.dtype} with {scales.dtype} {list(scales.shape)}"
        )


def quantise_activations(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, fp8 [M, K], and scales, float32 [M, ceil(K/128)], of activations [M, K] of any floating type.

    What is not a finite number makes its block's products NaN or infinite.
    """
    m, k = x.shape
    groups = F.pad(x.float(), (0, -k % BLOCK)).view(m, blocks(k), BLOCK)
    scales = _scales(groups.abs().amax(-1).clamp(min=LEAST_AMAX), power_of_two)
    # No quotient is rounded to more than MAX, so nothing has to be clamped, and NaN stays NaN.
    return (groups / scales.unsqueeze(-1)).view(m, -1)[:, :k].to(FP8), scales


def product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Quantised activations [M, K] times a weight's transpose, [M, N]."""
    check_scales(weight, scales)
    by_row = scales.repeat_interleave(BLOCK, 0)[: len(weight)]
    total = x_scales.new_zeros(len(x), len(weight))
    for block in range(blocks(x.shape[1])):
        channels = slice(block * BLOCK, (block + 1) * BLOCK)
        part = x[:, channels].float() @ weight[:, channels].float().t()
        total += part * (x_scales[:, block, None] * by_row[:, block])
    return total.to(dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """x [M, K], quantised, times the transpose of a weight [N, K]: [M, N] in the type of x."""
    return product(*quantise_activations(x, power_of_two), weight, scales, x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [M, 2 * W], computed in float32 and rounded once: [M, W]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def mlp(x: torch.Tensor, x_scales: torch.Tensor, weights: SwiGluWeights, dtype: torch.dtype) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of quantised activations [M, H]. Each projection is rounded to `dtype`."""
    inner = swiglu(product(x, x_scales, weights.gate_up, weights.gate_up_scales, dtype))
    return linear(inner, weights.down, weights.down_scales, weights.power_of_two)


def experts(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: SwiGluWeights,
    shared: range | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The weighted sum [T, H] of the chosen experts that this process has, `experts`; others contribute nothing.

    x, x_scales: quantised activations [T, H]. ids: [T, k] integers; weights: float32 [T, k]. Every projection is
    rounded to `dtype`, as is the sum, which is made in float32 in the order of a token's ids. shared: the last expert
    of the stack is not one of those that ids choose among, but computes these tokens of T, with weight 1.
    """

    def computed(tokens: torch.Tensor | slice, expert: int) -> torch.Tensor:
        return mlp(x[tokens], x_scales[tokens], experts[expert], dtype).float()

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(ids.shape[1]):
        local = ids[:, choice] - experts.first
        for expert in range(len(experts.gate_up) - (shared is not None)):
            chosen = (local == expert).nonzero().squeeze(1)
            if len(chosen):
                total[chosen] += weights[chosen, choice, None] * computed(chosen, expert)
    if shared:
        own = slice(shared.start, shared.stop)
        total[own] += computed(own, -1)
    return total.to(dtype)
