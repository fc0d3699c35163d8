"""Rotary position embedding in the two layouts that sparse-attention checkpoints use."""

import functools
from dataclasses import dataclass

import torch

from model.backends.device import fuses


@dataclass(frozen=True)
class RopeAngles:
    """The angles of all positions: position times frequency for each of the rope_dim / 2 pairs.

    scale: factor of cos and sin, which yarn has.
    """

    frequencies: tuple[float, ...]
    scale: float

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> "Rope":
        """The rotation of tokens at int64 positions [N], computed in float32."""
        frequencies = self._frequencies_on(positions.device)
        angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(1)
        return Rope((angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype))

    @functools.cache  # noqa: B019 a network has one, on one device
    def _frequencies_on(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.frequencies, device=device)


@dataclass(frozen=True)
class Rope:
    """The rotation of N tokens: cos and sin of each pair's angle, shape [N, 1, rope_dim / 2], in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def dim(self) -> int:
        """rope_dim."""
        return 2 * self.cos.shape[-1]

    def rotate(self, x: torch.Tensor, beside: torch.Tensor, *, interleaved: bool, beside_first: bool) -> torch.Tensor:
        """Rotate x, [N, heads, rope_dim], and concatenate it with `beside`, [N, heads, any width], unrotated.

        The members of a pair are neighbours in x (interleaved), or half its width apart (half-split). In the result all
        first members come before all second members.
        """
        if fuses(x):
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_rope import rotate

            return rotate(x, beside, self.cos, self.sin, interleaved, beside_first)
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((beside, *rotated) if beside_first else (*rotated, beside), dim=-1)
