"""What is measured: this project's swap-in, and SGLang's where it is installed, on the same selections."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from benchmarks.swap_in.workload import Rotation, Tiers
from hisparse.cuda_swap_in import CudaSwapIn

PEER = "sglang"
_PEER_BLOCK_SIZE = 960


class Launcher(Protocol):
    rotation: Rotation

    def launch(self, turn: int) -> object:
        """Launch selection number `turn` of the rotation."""
        ...

    def missing(self, turn: int) -> int:
        """How many positions of that selection are not resident now, over the batch."""
        ...


class Ours:
    """This project's backend, starting with empty hot buffers. Without `fetch` it only resolves."""

    def __init__(
        self, tiers: Tiers, swap_in: CudaSwapIn, rotation: Rotation, fetch: int = 1, cluster: int | None = None
    ) -> None:
        self.rotation = rotation
        self._tiers, self._swap_in = tiers, swap_in
        self._fetch, self._cluster = fetch, cluster
        self._identity = torch.full_like(rotation.rows, tiers.shape.hot_size)
        for row in range(rotation.batch):
            tiers.residency.reset_empty(row)

    def launch(self, turn: int) -> object:
        rotation = self.rotation
        selected = rotation.positions[turn % rotation.length]
        return self._swap_in.launch(
            0,
            rotation.rows,
            rotation.newest,
            rotation.queries,
            selected,
            fetch=self._fetch,
            identity=self._identity,
            cluster=self._cluster,
        )

    def missing(self, turn: int) -> int:
        union = self.rotation.union[turn % self.rotation.length]
        return int((self._tiers.residency.lookup(0, self.rotation.rows, union) < 0).sum())


class Peer:
    """SGLang's swap-in kernel, called as its coordinator calls it, with slots and host items of the same pools."""

    def __init__(self, tiers: Tiers, rotation: Rotation) -> None:
        shape, batch, on = tiers.shape, rotation.batch, rotation.rows.device
        self.rotation = rotation
        hot = torch.arange(shape.hot_size + 1, device=on)
        self._tokens = torch.full((batch, shape.hot_size + 1), -1, dtype=torch.int32, device=on)
        self._positions = rotation.positions.to(torch.int32)
        self._swap_in = _peer_function()
        self._arguments: dict[str, Any] = {
            "device_buffer_tokens": self._tokens,
            "host_cache_locs": tiers.device.host_slot_of[:batch],
            "device_buffer_locs": tiers.device.hot_slots(rotation.rows[:, None], hot).to(torch.int32),
            "host_cache": tiers.host.kv[0],
            "device_buffer": tiers.device.kv[0],
            "top_k_device_locs": torch.empty((batch, shape.top_k), dtype=torch.int32, device=on),
            "req_pool_indices": rotation.rows,
            "seq_lens": rotation.newest + 1,
            "lru_slots": torch.arange(shape.hot_size, dtype=torch.int16, device=on).repeat(batch, 1),
            "item_size_bytes": shape.item_bytes,
            "num_top_k": shape.top_k,
            "hot_buffer_size": shape.hot_size,
            "page_size": 1,
            "block_size": _PEER_BLOCK_SIZE,
            "num_real_reqs": torch.tensor([batch], dtype=torch.int32, device=on),
        }

    def launch(self, turn: int) -> object:
        return self._swap_in(top_k_tokens=self._positions[turn % self.rotation.length], **self._arguments)

    def missing(self, turn: int) -> int:
        selected = self._positions[turn % self.rotation.length]
        resident = sum(int(torch.isin(row, held).sum()) for row, held in zip(selected, self._tokens, strict=True))
        return selected.numel() - resident


def peer_version() -> str | None:
    """The version of the installed peer, None if it is not installed or has no swap-in kernel."""
    try:
        installed = version(PEER)
        _peer_function()
    except (PackageNotFoundError, ImportError, AttributeError):
        return None
    return installed


def _peer_function() -> Callable[..., object]:
    from importlib import import_module

    function: Callable[..., object] = import_module(
        "sglang.kernels.ops.kvcache.hisparse"
    ).load_cache_to_device_buffer_mla
    return function
