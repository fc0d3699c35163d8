"""What a decode process is sized to, and what it does without."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import StartupError
from decode_node import pools
from decode_node.config import DecodeConfig
from hisparse.config import HiSparseConfig
from hisparse.sizing import Sizes
from model.config import ModelSpec
from ranks.group import Ranks, SingleRank

SPEC = ModelSpec(
    model_type="deepseek_v32",
    num_layers=2,
    index_layer_of=(0, 1),
    item_dim=24,
    latent_dim=16,
    index_dim=8,
    index_topk=64,
    vocab_size=512,
    context_length=1024,
    dtype=torch.float32,
    fingerprint="f",
)
CONTEXT_BYTES = SPEC.context_length * SPEC.kv_layout.token_bytes


GIB = 2**30


class AlikeRanks(SingleRank):
    """A group whose other ranks say what this one says."""

    def __init__(self, size: int = 4, hosts: int = 1) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size, self.per_host = size, size // hosts

    def share_on_host(self, value: Any) -> list[Any]:
        return [value] * self.per_host


def planned(
    monkeypatch: pytest.MonkeyPatch,
    ranks: Ranks | None = None,
    device_bytes: int = 64 * CONTEXT_BYTES,
    host_bytes: int = 64 * GIB,
    local_prefill: bool = False,
    **hisparse: Any,
) -> Sizes:
    """The pools of a process whose device and host have so many bytes for them."""
    monkeypatch.setattr(pools, "pool_bytes", lambda device, fraction, to_load: device_bytes)
    monkeypatch.setattr(pools, "available_host_bytes", lambda: host_bytes)
    config = DecodeConfig(model_path=Path(), context_length=1024, allow_local_prefill=local_prefill)
    tiers = HiSparseConfig(device_buffer_size=128, top_k=64, **hisparse)
    return pools.plan_pools(config, tiers, SPEC, 0, ranks or SingleRank(torch.device("cpu")))[1]


def test_pages_of_local_prefill_are_part_of_what_pools_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    device_bytes = 8 * CONTEXT_BYTES
    alone = planned(monkeypatch, device_bytes=device_bytes)
    beside = planned(monkeypatch, device_bytes=device_bytes, local_prefill=True)
    assert beside.num_slabs < alone.num_slabs
    assert beside.device_bytes + CONTEXT_BYTES <= device_bytes


def test_a_device_without_room_for_them_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"--allow-local-prefill takes .* --context-length"):
        planned(monkeypatch, device_bytes=CONTEXT_BYTES - 1, local_prefill=True)


def test_a_decode_process_compiles_no_copies() -> None:
    """It receives and never copies between processes; numba and what it compiles took a third of its imports."""
    code = "import sys, decode_node.process; print(*sorted({'numba', 'transfer.copy_runs'} & sys.modules.keys()))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == []


def test_the_host_pool_of_a_node_is_divided_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"host_to_device_ratio": None, "host_pool_gib": 1.0}
    alone = planned(monkeypatch, **budget)
    each = planned(monkeypatch, AlikeRanks(), **budget)
    assert each.num_host_slots == alone.num_host_slots // 4
    assert each.max_requests == alone.max_requests


def test_ranks_of_two_hosts_divide_the_memory_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang 38156: host memory was counted per rank of one host and overcommitted."""
    budget = {"host_to_device_ratio": None, "host_pool_gib": 1.0}
    two_hosts = planned(monkeypatch, AlikeRanks(8, hosts=2), **budget)
    assert two_hosts.num_host_slots == planned(monkeypatch, AlikeRanks(4), **budget).num_host_slots
    one = two_hosts.host_bytes + two_hosts.prefix_cache_bytes
    planned(monkeypatch, AlikeRanks(8, hosts=2), host_bytes=4 * one, **budget)
    with pytest.raises(StartupError, match=r"^the host pools of 4 ranks need .* together, available are .*: lower"):
        planned(monkeypatch, AlikeRanks(8, hosts=2), host_bytes=4 * one - 1, **budget)


@pytest.mark.parametrize(("asked", "fits"), [(None, 600), (600, 600), (601, None)])
def test_the_context_is_what_fits_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, fits: int | None
) -> None:
    monkeypatch.setattr(pools, "pool_bytes", lambda device, fraction, to_load: 64 * CONTEXT_BYTES - to_load)
    monkeypatch.setattr(pools, "available_host_bytes", lambda: 64 * GIB)
    pool_gib = 600 * SPEC.kv_layout.token_bytes / GIB
    tiers = HiSparseConfig(device_buffer_size=128, top_k=64, host_to_device_ratio=None, host_pool_gib=pool_gib)
    spec, config = replace(SPEC, context_length=asked or 1024), DecodeConfig(model_path=Path(), context_length=asked)
    if fits is None:
        with pytest.raises(StartupError, match="the host pool holds 600 tokens, fewer than one request of"):
            pools.fit_pools(config, tiers, spec, 0, SingleRank(torch.device("cpu")), 1000)
    else:
        fitting, sizes = pools.fit_pools(config, tiers, spec, 0, SingleRank(torch.device("cpu")), 1000)
        assert fitting.context_length == sizes.max_context == fits
