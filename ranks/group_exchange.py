"""What the ranks of a group exchange around a mixture of experts, by torch.distributed's collectives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class GroupExchange:
    """An Exchange of equal numbers of tokens: every rank calls it with tensors of the same shape, in the same order.

    The tokens of all ranks lie in the order of the ranks. Partial sums are added in that order on a CPU, in float32,
    so that it does not matter which rank a token is at; NCCL adds in the network's dtype, in an order of its own.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        # torch 2.13 gave them other names.
        self._all_gather = _collective("all_gather_single", "all_gather_into_tensor")
        self._reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        gathered = rows.new_empty(self._size * len(rows), *rows.shape[1:])
        self._all_gather(gathered, rows.contiguous())
        return gathered

    def own(self, count: int) -> range:
        """See Exchange."""
        return range(self._rank * count, (self._rank + 1) * count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        """See Exchange."""
        count = len(parts) // self._size
        if parts.is_cuda:
            reduced = parts.new_empty(count, *parts.shape[1:])
            self._reduce_scatter(reduced, parts.contiguous())
            return reduced
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous())
        total = torch.zeros(count, *parts.shape[1:])
        for part in received.view(self._size, count, *parts.shape[1:]):
            total += part.float()
        return total.to(parts.dtype)


def _collective(*names: str) -> Callable[..., Any]:
    """The first of them that this version of torch has."""
    function: Callable[..., Any] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return function
