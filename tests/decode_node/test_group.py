"""Ranks divide the memory of their host."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import StartupError
from decode_node import process
from decode_node.config import DecodeConfig
from hisparse.config import HiSparseConfig
from hisparse.sizing import Sizes
from ranks.group import RankGroup
from tests.decode_node.test_process import CONTEXT_BYTES, SPEC

GIB = 2**30


@dataclass
class AlikeRanks(RankGroup):
    """A group whose other ranks say what this one says."""

    size: int = 4
    hosts: int = 1

    @property
    def per_host(self) -> int:
        return self.size // self.hosts

    def share(self, value: Any) -> list[Any]:
        return [value] * self.size

    def share_on_host(self, value: Any) -> list[Any]:
        return [value] * self.per_host


def planned(
    monkeypatch: pytest.MonkeyPatch, ranks: RankGroup | None, host_bytes: int = 64 * GIB, **config: Any
) -> Sizes:
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: 64 * CONTEXT_BYTES)
    monkeypatch.setattr(process, "available_host_bytes", lambda: host_bytes)
    hisparse = HiSparseConfig(device_buffer_size=128, top_k=64, **config)
    return process._plan(DecodeConfig(model_path=Path()), hisparse, SPEC, torch.device("cpu"), ranks)


def test_the_host_pool_of_a_node_is_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"host_to_device_ratio": None, "host_pool_gib": 1.0}
    alone = planned(monkeypatch, None, **budget)
    each = planned(monkeypatch, AlikeRanks(), **budget)
    assert each.num_host_slots == alone.num_host_slots // 4
    assert each.max_requests == alone.max_requests


def test_ranks_of_two_hosts_divide_the_memory_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"host_to_device_ratio": None, "host_pool_gib": 1.0}
    two_hosts = planned(monkeypatch, AlikeRanks(8, hosts=2), **budget)
    assert two_hosts.num_host_slots == planned(monkeypatch, AlikeRanks(4), **budget).num_host_slots
    one = two_hosts.host_bytes + two_hosts.prefix_cache_bytes
    planned(monkeypatch, AlikeRanks(8, hosts=2), host_bytes=4 * one, **budget)
    with pytest.raises(StartupError, match=r"^the host pools of 4 ranks need "):
        planned(monkeypatch, AlikeRanks(8, hosts=2), host_bytes=4 * one - 1, **budget)


def test_host_pools_that_do_not_fit_together_are_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang 38156: host memory was counted per rank of one host and overcommitted."""
    sizes = planned(monkeypatch, None)
    one = sizes.host_bytes + sizes.prefix_cache_bytes
    assert planned(monkeypatch, AlikeRanks(), host_bytes=4 * one).host_bytes == sizes.host_bytes
    with pytest.raises(StartupError, match=r"^the host pools of 4 ranks need .* together, available are .*: lower"):
        planned(monkeypatch, AlikeRanks(), host_bytes=4 * one - 1)
