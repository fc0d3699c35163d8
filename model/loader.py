"""Loads a Hugging Face checkpoint of a sparse-attention model."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from base.errors import StartupError
from hisparse.format import KVCacheDtype
from model.backends.protocol import AttentionBackend
from model.backends.torch_backend import TorchBackend
from model.checkpoint import fingerprint, read_json, weight_files
from model.shard import WHOLE, Shard
from model.sparse_model import SparseModel
from model.spec import ModelSpec

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint's files, or random numbers."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SUPPORTED_MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")


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


def read_spec(
    path: Path,
    dtype: torch.dtype,
    context_length: int | None = None,
    load_format: LoadFormat = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
) -> ModelSpec:
    """Read a checkpoint's shapes and identity from its configuration and weight headers, without its weights.

    `context_length` defaults to all that the model was made for. With load_format `dummy` there need not be weights.
    Raises StartupError where the directory is not a complete checkpoint of a supported model, or its KV cannot be
    stored as `kv_cache_dtype`.
    """
    raw = read_json(path / "config.json")
    config = _parse_config(path, raw)
    if context_length is None:
        context_length = config.max_position_embeddings
    if not 0 < context_length <= config.max_position_embeddings:
        raise StartupError(
            f"the context length must be between 1 and the model's max_position_embeddings, "
            f"{config.max_position_embeddings}, not {context_length}"
        )
    spec = ModelSpec(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        index_layer_of=_index_layer_of(path, config),
        item_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        latent_dim=config.kv_lora_rank,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        vocab_size=config.vocab_size,
        context_length=context_length,
        dtype=dtype,
        fingerprint=fingerprint(raw, weight_files(path) if load_format == "auto" else []),
        kv_cache_dtype=kv_cache_dtype,
    )
    try:
        _ = spec.kv_format
    except ValueError as error:
        raise StartupError(f"{path}: --kv-cache-dtype {kv_cache_dtype}: {error}") from error
    return spec


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None = None,
    backend: AttentionBackend | None = None,
    load_format: LoadFormat = "auto",
    shard: Shard = WHOLE,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> SparseModel:
    """Load a checkpoint's weights, converted to `dtype`, onto a device. Never reaches the network.

    Tensors are copied one by one from mapped files, so only a few of them are in host memory at a time, besides the
    page cache. Experts are fused on the device, which temporarily takes the memory of one or two more layers' experts.

    `backend` computes attention, on KV of `kv_cache_dtype`; by default torch does. With load_format `dummy` the device
    generates random weights instead, the same on every device of a kind, as in SGLang and vLLM.

    Raises StartupError for what `read_spec` refuses, and where weights are missing or have other shapes.
    """
    spec = read_spec(path, dtype, context_length, load_format, kv_cache_dtype)
    network = _dummy_network(path, dtype, device) if load_format == "dummy" else _load_network(path, dtype, device)
    if device.type == "cuda":  # the pools need what fusing left in the allocator's cache
        torch.cuda.empty_cache()
    return SparseModel(network.requires_grad_(False).eval(), spec, backend or TorchBackend(spec.kv_format), shard)


def _load_network(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    disable_progress_bar()  # it does not belong in a log
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, device_map={"": device}, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # the library lets through what its file readers raise
        raise StartupError(f"the weights in {path} cannot be loaded: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise StartupError(f"{path} lacks {len(missing)} weights, which would be random: {', '.join(missing[:3])}")
    return network


def _dummy_network(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with device, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _parse_config(path: Path, raw: dict[str, Any]) -> Any:
    """The library's configuration object, with its defaults for what config.json lacks."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise StartupError(
            f"{path} is not a sparse-attention (DSA) checkpoint: its model_type is {model_type!r}; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if raw.get("q_lora_rank", 0) is None:
        raise StartupError(f"{path}/config.json has q_lora_rank null: the indexer needs low-rank queries")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise StartupError(
                f"{path} has quantised weights ({key}: {method}), which are not served; "
                f"give a checkpoint with weights in {' or '.join(DTYPES)}"
            )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the library's validation raises classes of its own and of its dependencies
        raise StartupError(f"{path}/config.json is not a valid {model_type} config: {_first_line(error)}") from error


def _index_layer_of(path: Path, config: Any) -> tuple[int, ...]:
    num_layers = config.num_hidden_layers
    # Entries past the last layer belong to the multi-token prediction layers, which are not loaded.
    kinds = (getattr(config, "indexer_types", None) or ["full"] * num_layers)[:num_layers]
    if len(kinds) < num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise StartupError(
            f"{path}/config.json should have 'full' or 'shared' as indexer_types for each of its {num_layers} layers, "
            f"the first one 'full', not {kinds}"
        )
    return tuple(kinds[: layer + 1].count("full") - 1 for layer in range(num_layers))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
