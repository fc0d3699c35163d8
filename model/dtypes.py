"""The dtype in which a checkpoint is served."""

from pathlib import Path

import torch

from base.errors import StartupError
from model.checkpoint import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(path: Path, name: str) -> torch.dtype:
    """The dtype called `name`; `auto` is the one that the checkpoint names in its configuration.

    Raises StartupError for dtypes that are not served.
    """
    if name == "auto":
        config = read_json(path / "config.json")
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if name not in DTYPES:
        raise StartupError(f"dtype {name} is not served; give --dtype {' or '.join(DTYPES)}")
    return DTYPES[name]
