"""Checkpoints that are damaged on purpose, and the line with which they are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import StartupError
from model.loader import load_model


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, or remove those that are None, in its files and in the index if it has one."""
    index_path = path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"weight_map": {}}
    for file in sorted(path.glob("*.safetensors")):
        weights = load_file(file)
        for name in set(weights) & set(changes):
            changed = changes[name]
            if changed is None:
                del weights[name]
                index["weight_map"].pop(name, None)
            else:
                weights[name] = changed
        save_file(weights, file, metadata={"format": "pt"})
    if index_path.exists():
        index_path.write_text(json.dumps(index))


def refusal(path: Path) -> str:
    """The one line with which the checkpoint is refused."""
    with pytest.raises(StartupError) as refused:
        load_model(path, torch.float32, torch.device("cpu"))
    assert "\n" not in str(refused.value)
    return str(refused.value)
