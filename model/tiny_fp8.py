"""Makes the weights of a tiny checkpoint block-fp8, stored like those of the published ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.fp8 import BLOCK, quantise_weight
from kernels.operands import BlockFp8
from model.checkpoint import INDEX_FILE
from model.stored_weights import SCALES

_SHARDS = 3
_NEVER = ("embed_tokens", "lm_head", "mlp.gate", "indexer.weights_proj", "eh_proj", "shared_head.head")
"""Matrices that no published checkpoint has in fp8, by the end of their names."""
_FLOAT32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")


def quantization_config(fp8: BlockFp8, left_out: list[str]) -> dict[str, Any]:
    """What config.json says of the weights. left_out: modules that are not quantised."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left_out,
        **({"scale_fmt": "ue8m0"} if fp8.power_of_two else {}),
    }


def write_fp8(path: Path, weights: Mapping[str, torch.Tensor], fp8: BlockFp8, left_out: list[str]) -> None:
    """Write weights as shards with an index: projections in block-fp8, the others in bfloat16 or float32.

    left_out: projections that stay in bfloat16.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if values.dim() == 2 and not module.endswith(_NEVER) and module not in left_out:
            stored[name], stored[f"{name}{SCALES}"] = quantise_weight(values, fp8.power_of_two)
        else:
            stored[name] = values.to(torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16)
    names = list(stored)
    share = -(-len(names) // _SHARDS)
    file_of = {name: f"model-{i // share + 1:05}-of-{_SHARDS:06}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(file_of.values())):
        part = {name: stored[name] for name in names if file_of[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    metadata = {"total_size": sum(values.nbytes for values in stored.values())}
    (path / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2) + "\n")
