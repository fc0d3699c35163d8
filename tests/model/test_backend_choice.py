"""Which attention backend a node gets, or the line that says why it gets none."""

import dataclasses
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import StartupError
from kernels import ops
from model.config import ModelSpec
from model.loader import BackendName, choose_backend, read_spec

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def spec(checkpoint: Path) -> ModelSpec:
    return read_spec(checkpoint, torch.bfloat16)


def pretend(monkeypatch: pytest.MonkeyPatch, lacking: str = "") -> None:
    """That the machine has all that the backend takes, or lacks one thing. Nothing here uses Triton itself."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None if lacking == "triton" else types.ModuleType("triton"))
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "compiler" else f"/usr/bin/{name}")
    monkeypatch.setattr(ops, "PYTHON_HEADER", Path("/lacking/Python.h") if lacking == "headers" else Path(__file__))
    if lacking == "kernels":
        for name in ("kernels.top_k", "kernels.launch"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)


@pytest.mark.parametrize(
    ("asked", "device", "dtype"),
    [
        ("auto", CPU, torch.float32),
        ("auto", CPU, torch.bfloat16),
        ("auto", CUDA, torch.float32),  # ties decide its tokens
        ("torch", CUDA, torch.bfloat16),
    ],
)
def test_torch_is_chosen(spec: ModelSpec, asked: BackendName, device: torch.device, dtype: torch.dtype) -> None:
    assert choose_backend(asked, device, dataclasses.replace(spec, dtype=dtype)).name == "torch"


def test_triton_on_a_cpu_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(StartupError, match="on CUDA devices, not on cpu; give --attention-backend torch"):
        choose_backend("triton", CPU, spec)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("triton", "triton, which cannot be imported"),
        ("compiler", "C compiler"),
        ("headers", r"Python's headers at run time, and there is no /lacking/Python\.h"),
        ("kernels", r"needs cuda\.bindings, .*: install hisparse-pd\[kernels\]; give --attention-backend torch"),
    ],
)
def test_where_triton_cannot_run_auto_makes_do_with_torch(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, lacking: str, message: str
) -> None:
    pretend(monkeypatch, lacking)
    with pytest.raises(StartupError, match=message):
        choose_backend("triton", CUDA, spec)
    assert choose_backend("auto", CUDA, spec).name == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_dim": 1024, "item_dim": 1088}, "kv_lora_rank of at most 512, not 1024"),
        ({"latent_dim": 48, "item_dim": 176}, "qk_rope_head_dim of at most 64, not 128"),
        ({"index_dim": 256}, "index_head_dim of at most 128, not 256"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "dtype": torch.float32},
            "reads fp8 KV in bfloat16 models, not in torch.float32",
        ),
        ({"kv_cache_dtype": "fp8_e4m3", "index_dim": 8}, "index_head_dim of 16 or more, not 8"),
        ({"kv_cache_dtype": "float32"}, "reads KV of the type that it computes in, bfloat16, or fp8_e4m3, not float32"),
    ],
)
def test_shapes_and_kv_that_no_kernel_reads_are_refused(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    pretend(monkeypatch)
    with pytest.raises(StartupError, match=message):
        choose_backend("triton", CUDA, dataclasses.replace(spec, **changes))


def test_auto_reads_such_kv_by_torch(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    mixed = dataclasses.replace(spec, kv_cache_dtype="float32")
    assert choose_backend("auto", CUDA, mixed).name == "torch"
