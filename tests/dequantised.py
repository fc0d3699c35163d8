"""Copies of block-fp8 checkpoints in float32, for transformers, written without the code that they are to check."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_CONFIG = "config.json"
_SIDE = 128


def write_dequantised(source: Path, target: Path) -> None:
    """Write a checkpoint whose weights are those of `source`, each block of 128 x 128 times its scale."""
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        stored |= load_file(file)
    weights = {name: values for name, values in stored.items() if not name.endswith("_scale_inv")}
    for name, values in weights.items():
        exact = values.to(torch.float32)
        if values.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"]
            for row in range(0, values.shape[0], _SIDE):
                for column in range(0, values.shape[1], _SIDE):
                    exact[row : row + _SIDE, column : column + _SIDE] *= scales[row // _SIDE, column // _SIDE]
        weights[name] = exact
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and not file.name.startswith("model."):
            shutil.copy(file, target)
    config = json.loads((source / _CONFIG).read_text())
    del config["quantization_config"]
    (target / _CONFIG).write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
