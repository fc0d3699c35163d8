"""What the ranks of a group exchange around a mixture of experts, by torch.distributed's collectives."""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from model.shard import Exchange

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Of the libraries: the network interface over which ranks find each other."""
_SETTINGS = {
    # Multicast over NVLink takes resources of the whole host, and gains nothing for the few rows of a step.
    "NCCL_NVLS_ENABLE": "0",
    # It would write to buffers of the graph that the peer recorded together with this one; ranks may replay different
    # ones, since their contexts differ.
    "NCCL_GRAPH_REGISTER": "0",
}
"""Settings of the libraries, where the environment does not say otherwise."""


class GroupExchange(Exchange):
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

    @classmethod
    def connect(
        cls, store: Any, rank: int, size: int, device: torch.device, interface: str | None, timeout: timedelta
    ) -> "GroupExchange":
        """Connect the ranks: by NCCL on GPUs, by gloo on CPUs. Waits for all of them. interface: that leads to them."""
        interfaces = dict.fromkeys(_INTERFACES, interface) if interface else {}
        for name, value in {**interfaces, **_SETTINGS}.items():
            os.environ.setdefault(name, value)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        return cls(rank, size)

    def close(self) -> None:
        """Disconnect, if all ranks do. NCCL waits until the recorded steps that use it are given back."""
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = rows.new_empty(self._size * len(rows), *rows.shape[1:])
        self._all_gather(gathered, rows.contiguous())
        return gathered

    def own(self, count: int) -> range:
        return range(self._rank * count, (self._rank + 1) * count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
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
