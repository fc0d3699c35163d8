"""fp8 KV by its definition, independently of the product: float8_e4m3 from a table, the rotation as a matrix.

`Fp8Cache` is the cache of a transformers model that keeps what an fp8 item and an fp8 index key hold.
"""

from typing import Any

import torch
from transformers import DynamicCache

_GRID = torch.tensor(
    [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    + [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)][:-1]
)
"""The numbers of float8_e4m3 that are not negative, by their codes: 0 to 448 (the last code is NaN)."""
ITEM_SCALE_BITS = 1
"""Significant bits of an item's scales, which are powers of two."""
_BETWEEN = (_GRID[1:] + _GRID[:-1]) / 2


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of float8_e4m3, of two the one with the even code."""
    size = x.abs()
    code = torch.searchsorted(_BETWEEN, size)
    tie = (size == _BETWEEN[code.clamp(max=len(_BETWEEN) - 1)]) & (code % 2 == 1)
    return _GRID[(code + tie).clamp(max=len(_GRID) - 1)] * x.sign()


def rounded(x: torch.Tensor, together: int, scale_bits: int | None = None) -> torch.Tensor:
    """x, float32 [..., dim], as it is read back, with a scale for every started `together` elements.

    scale_bits: significant bits that scales are rounded up to.
    """
    parts = []
    for part in x.split(together, dim=-1):
        scale = torch.maximum(part.abs().max(-1, keepdim=True).values, torch.tensor(1e-4)) / 448
        if scale_bits is not None:
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ceil(mantissa * 2**scale_bits) / 2**scale_bits, exponent)
        parts.append(nearest_e4m3(part / scale) * scale)
    return torch.cat(parts, dim=-1)


def hadamard(dim: int) -> torch.Tensor:
    """Orthonormal, in Sylvester's order."""
    matrix, block = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < dim:
        matrix = torch.kron(block, matrix)
    return matrix / dim**0.5


class Fp8Cache(DynamicCache):
    """What a transformers model computes with if it keeps its latents, roped keys and index keys in fp8 items."""

    def update(self, latents: torch.Tensor, ropes: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(latents, 128, ITEM_SCALE_BITS), ropes.bfloat16().float(), *args, **kwargs)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        rotation = hadamard(keys.shape[-1])
        # Rotated back, since the model's queries are not rotated.
        return super().update_indexer(rounded(keys @ rotation, keys.shape[-1]) @ rotation, layer_idx)
