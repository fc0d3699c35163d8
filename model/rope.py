"""Rotary position embedding in the two layouts that sparse-attention checkpoints use."""

from dataclasses import dataclass

import torch

from model.backends.device import fuses


@dataclass(frozen=True)
class Rope:
    """The rotation of N tokens: cos and sin of each pair's angle, shape [N, 1, rope_dim / 2], in the model's dtype.

    Both methods take x of shape [N, heads, rope_dim] and return the pairs' first members in the first half and their
    second members in the second half. They differ in where they find a pair in the input: next to each other
    (interleaved), or half the width apart (half-split). `before` and `after`, [N, heads, any width], are put in front
    of the result and behind it.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, cos: torch.Tensor, sin: torch.Tensor) -> "Rope":
        """Take cos and sin of shape [N, rope_dim] whose two halves repeat each other, as transformers makes them."""
        half = cos.shape[-1] // 2
        return cls(cos[:, None, :half], sin[:, None, :half])

    def interleaved(
        self, x: torch.Tensor, before: torch.Tensor | None = None, after: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._rotate(x, before, after, interleaved=True)

    def half_split(
        self, x: torch.Tensor, before: torch.Tensor | None = None, after: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._rotate(x, before, after, interleaved=False)

    def _rotate(
        self, x: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None, interleaved: bool
    ) -> torch.Tensor:
        if fuses(x):
            # Here, since a machine without a GPU need not have Triton.
            from model.backends.triton_rope import rotate

            return rotate(x, self.cos, self.sin, before, after, interleaved)
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        rotated_first = first * self.cos - second * self.sin
        rotated_second = second * self.cos + first * self.sin
        parts = (before, rotated_first, rotated_second, after)
        return torch.cat([part for part in parts if part is not None], dim=-1)
