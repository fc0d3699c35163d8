"""Rotary position embedding in the two layouts that sparse-attention checkpoints use."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """The rotation of N tokens: cos and sin of each pair's angle, shape [N, 1, rope_dim / 2], in the model's dtype.

    Both methods take x of shape [N, heads, rope_dim] and return the pairs' first members in the first half and their
    second members in the second half. They differ in where they find a pair in the input: next to each other
    (interleaved), or half the width apart (half-split).
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, cos: torch.Tensor, sin: torch.Tensor) -> "Rope":
        """Take cos and sin of shape [N, rope_dim] whose two halves repeat each other, as transformers makes them."""
        half = cos.shape[-1] // 2
        return cls(cos[:, None, :half], sin[:, None, :half])

    def interleaved(self, x: torch.Tensor) -> torch.Tensor:
        return self._rotate(x[..., 0::2], x[..., 1::2])

    def half_split(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return self._rotate(first, second)

    def _rotate(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        rotated_first = first * self.cos - second * self.sin
        rotated_second = second * self.cos + first * self.sin
        return torch.cat((rotated_first, rotated_second), dim=-1)
