"""What a top-k selects, by a stable sort."""

import torch


def sorted_top(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """NaN first, then the largest, of equal scores the first. -1 behind the end of a row that has fewer."""
    rows, width = scores.shape
    expected = torch.full((rows, min(k, width)), -1)
    ends = [width] * rows if lengths is None else lengths.clamp(0, width).tolist()
    for row, (values, end) in enumerate(zip(scores.cpu(), ends, strict=True)):
        best = values[:end].sort(descending=True, stable=True).indices[:k].sort().values
        expected[row, : len(best)] = best
    return expected.to(scores.device)
