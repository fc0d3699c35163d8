"""What a decode process is sized to, and what it does without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from base.errors import StartupError
from decode_node import process
from decode_node.config import DecodeConfig
from hisparse.config import HiSparseConfig
from hisparse.sizing import Sizes
from model.spec import ModelSpec

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


def planned(monkeypatch: pytest.MonkeyPatch, device_bytes: int, local_prefill: bool) -> Sizes:
    """The pools of a process whose device has so many bytes for them."""
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: device_bytes)
    config = DecodeConfig(model_path=Path(), allow_local_prefill=local_prefill)
    return process._plan(config, HiSparseConfig(device_buffer_size=128, top_k=64), SPEC, torch.device("cpu"))


def test_pages_of_local_prefill_are_part_of_what_pools_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come after the tiers, which would have taken all of it."""
    device_bytes = 8 * CONTEXT_BYTES
    alone = planned(monkeypatch, device_bytes, local_prefill=False)
    beside = planned(monkeypatch, device_bytes, local_prefill=True)
    assert beside.num_device_slots < alone.num_device_slots
    assert beside.device_bytes + CONTEXT_BYTES <= device_bytes


def test_a_device_without_room_for_them_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"--allow-local-prefill takes .* --context-length"):
        planned(monkeypatch, CONTEXT_BYTES - 1, local_prefill=True)


def test_a_decode_process_compiles_no_copies() -> None:
    """It receives and never copies between processes; numba and what it compiles took a third of its imports."""
    code = "import sys, decode_node.process; print(*sorted({'numba', 'transfer.copy_runs'} & sys.modules.keys()))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.split() == []
