"""Random checkpoints in block-fp8 with the heads, items and index keys of published models, and fewer layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from benchmarks.loading import Wanted
from kernels.fp8 import FP8, quantise_weight
from kernels.operands import BlockFp8
from model.config import NetworkConfig, network_config
from model.families import published_config
from model.network import Network
from model.stored_weights import SCALES
from model.tiny import quantization_config, write_without_weights

PublishedShape = Literal["deepseek-v3.2", "glm-5.2"]
_POWER_OF_TWO = {"deepseek-v3.2": True, "glm-5.2": False}
_GAINS = {"q_b_proj": 2.0, "o_proj": 0.5, "down_proj": 0.15}
"""Factors of 1 / sqrt(fan_in). Attention is to be sharp, and no layer is to drown what came before it: else one expert
that rounding chooses moves logits more than all that is to be compared."""

Sizes = Mapping[str, int]
SIZES: Sizes = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "vocab_size": 4096,
}
"""What is smaller than published, beside the number of layers and experts."""
LAYERS, EXPERTS = 4, 32


@dataclass(frozen=True)
class RandomCheckpoint:
    """tensors: by their published names, scales included, on any device. raw: config.json."""

    raw: Mapping[str, Any]
    config: NetworkConfig
    tensors: dict[str, torch.Tensor]

    def write(self, path: Path) -> None:
        """As a directory that `load_model` reads."""
        write_without_weights(path, dict(self.raw))
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def random_checkpoint(shape: PublishedShape, device: torch.device, sizes: Sizes = SIZES) -> RandomCheckpoint:
    """The first layer is dense; of GLM-5.2's layers every other one shares the selection of the layer before it.

    Activations are quantised with scales that are powers of two for DeepSeek-V3.2, with any for GLM-5.2, as published.
    """
    fp8 = BlockFp8(_POWER_OF_TWO[shape])
    raw = published_config(shape, LAYERS, EXPERTS) | dict(sizes)
    raw |= {
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        "quantization_config": quantization_config(fp8, []),
    }
    if shape == "glm-5.2":
        raw["indexer_types"] = ["full", "shared"] * (LAYERS // 2)
    config = network_config(AutoConfig.for_model(**raw), fp8)
    wanted = Wanted()
    Network.load(wanted, config)
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, dims) in wanted.tensors.items():
        if name.endswith(SCALES):
            continue
        values = _values(name, dims, generator)
        if dtype == FP8:
            tensors[name], tensors[f"{name}{SCALES}"] = quantise_weight(values, fp8.power_of_two)
        else:
            tensors[name] = values.to(dtype)
    return RandomCheckpoint(raw, config, tensors)


def _values(name: str, dims: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(dims, generator=generator, device=generator.device)
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module.endswith("norm"):
        return 1 + 0.1 * values
    if module.endswith("bias"):
        return 0.1 * values
    if module == "embed_tokens":
        return values
    return values * (_GAINS.get(module, 1.0) / math.sqrt(dims[-1]))
