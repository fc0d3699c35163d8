"""Rotary position embedding in the two layouts that sparse-attention checkpoints use."""

from dataclasses import dataclass

import torch

from model.backends.device import fuses


@dataclass(frozen=True)
class Rope:
    """The rotation of N tokens: cos and sin of each pair's angle, shape [N, 1, rope_dim / 2], in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, cos: torch.Tensor, sin: torch.Tensor) -> "Rope":
        """Take cos and sin of shape [N, rope_dim] whose two halves repeat each other, as transformers makes them."""
        half = cos.shape[-1] // 2
        return cls(cos[:, None, :half], sin[:, None, :half])

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
