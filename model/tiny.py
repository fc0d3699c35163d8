"""Tiny random checkpoints with the architecture of the real ones, for demos and tests.

A Hugging Face directory: config, weights under the names of the real checkpoints, a byte-level tokenizer and a chat
template. The same arguments always give the same weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kernels.fp8 import BLOCK, quantise_weight
from kernels.operands import BlockFp8
from model.checkpoint import INDEX_FILE
from model.families import DRAFT_LAYER, FAMILIES, FamilyName, LayerKind
from model.stored_weights import SCALES
from model.tiny_tokenizer import BEGIN_ID, BYTE_VOCAB_SIZE, END_ID, tiny_tokenizer, with_template

# Factors of 1/sqrt(fan_in), by the weight's name; 1 for others. They meet two demands. Outputs must depend on what is
# selected, or greedy decoding falls into short cycles and tests see no wrong selection. So attention is sharp, and the
# last layer's attention is as strong as the embeddings. And a flipped selection must not change tokens, since rounding
# decides which of two positions with nearly equal index scores is selected (gaps of 5e-7 occur). A selected position is
# about one 64th of the attention. But in any layer before the last, a moved hidden state moves later selections and
# experts too, and the change grows to the size of the logits. Weak attention and MLPs there keep it from growing.
GAINS = {"q_b_proj": 3.0, "o_proj": 0.1, "down_proj": 0.25}
LAST_O_PROJ_GAIN = 1.0

_LEAST_SIZES = {
    "layers": 1,
    "index_topk": 1,
    "max_position_embeddings": 1,
    "vocab_size": BYTE_VOCAB_SIZE,
    "hidden_size": 16,
    "index_n_heads": 16,
}
_WHY = {
    "vocab_size": ": all bytes are tokens",
    # It is likely that every head's ReLU is zero for some positions, whose scores then tie.
    "index_n_heads": ": with fewer heads index scores are often exactly zero, and ties in the top-k make outputs "
    "irreproducible",
}
_SHARDS = 3
_NEVER_FP8 = ("embed_tokens", "lm_head", "mlp.gate", "indexer.weights_proj", "eh_proj", "shared_head.head")
"""Matrices that no published checkpoint has in fp8, by the end of their names."""
_FLOAT32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")


class TinySizes(TypedDict, total=False):
    """Sizes of a tiny checkpoint that are not the usual ones.

    vocab_size: rows of the embedding and the head; the tokenizer may have fewer tokens (`tiny_tokenizer`).
    """

    layers: int
    hidden_size: int
    index_topk: int
    index_n_heads: int
    max_position_embeddings: int
    vocab_size: int


def write_tiny_checkpoint(
    path: Path,
    family: FamilyName,
    seed: int,
    *,
    fp8: BlockFp8 | None = None,
    draft_layer: bool = True,
    **sizes: Unpack[TinySizes],
) -> None:
    """Write a complete random checkpoint of about a million parameters into a directory.

    It is stored, and by default served, in float32, but its matrices and norms hold bfloat16 values: a bfloat16 run
    rounds none of them.

    The first layer is dense, the others are mixtures of experts. GLM's layers share selections: from the third on,
    every other layer reuses the selection of the layer before it. Raises ValueError for a shape that cannot work.

    fp8: as the published checkpoints in block-fp8 are, with shards, an index and a projection that is left out; latents
    are wider than a block, and no multiple of it. draft_layer: with a multi-token prediction layer, which transformers
    does not read.
    """
    for name, size in cast(dict[str, int], sizes).items():
        if size < _LEAST_SIZES[name]:
            raise ValueError(f"{name} must be at least {_LEAST_SIZES[name]}, not {size}{_WHY.get(name, '')}")
    config = AutoConfig.for_model(**tiny_config(family, fp8=fp8 is not None, **sizes))
    weights = _drawn(_shapes(config), seed, f"model.layers.{config.num_hidden_layers - 1}.")
    if draft_layer:
        weights |= _prediction_layer(config, seed + 1, weights)
    described = config.to_dict() | {"num_nextn_predict_layers": int(draft_layer)}
    if fp8 is None:
        write_without_weights(path, described, config.vocab_size)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    left_out = [f"model.layers.{config.num_hidden_layers - 1}.self_attn.q_a_proj"]
    described |= {"quantization_config": quantization_config(fp8, left_out)}
    write_without_weights(path, described, config.vocab_size)
    _write_fp8(path, weights, fp8, left_out)


def tiny_config(
    family: FamilyName,
    *,
    vocab_size: int = BYTE_VOCAB_SIZE,
    layers: int = 4,
    hidden_size: int = 64,
    index_topk: int = 64,
    index_n_heads: int = 32,
    max_position_embeddings: int = 8192,
    fp8: bool = False,
) -> dict[str, Any]:
    """The config.json of a tiny checkpoint, but for its special tokens. fp8: latents are wider than a block of it."""
    return dict(
        model_type=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size // 2,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        kv_lora_rank=144 if fp8 else 48,
        q_lora_rank=160 if fp8 else 48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        index_topk=index_topk,
        index_n_heads=index_n_heads,
        index_head_dim=32,
        max_position_embeddings=max_position_embeddings,
        # A padding token would make a zero embedding row, whose index scores all tie.
        pad_token_id=None,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        dtype="bfloat16" if fp8 else "float32",
        **FAMILIES[family].tiny,
    )


def write_without_weights(path: Path, config: dict[str, Any], tokens: int = BYTE_VOCAB_SIZE) -> None:
    """Write all files of a checkpoint but its weights, for `--load-format dummy`.

    config: of config.json; its special tokens become those of the tokenizer, which has at most so many tokens.
    """
    path.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID}
    for name, content in (("config.json", {**config, **special}), ("generation_config.json", special)):
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with_template(tiny_tokenizer(tokens), config["max_position_embeddings"]).save_pretrained(path)


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


def _write_fp8(path: Path, weights: Mapping[str, torch.Tensor], fp8: BlockFp8, left_out: list[str]) -> None:
    """Write weights as shards with an index: projections in block-fp8, the others in bfloat16 or float32.

    left_out: projections that stay in bfloat16.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if values.dim() == 2 and not module.endswith(_NEVER_FP8) and module not in left_out:
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


def _drawn(shapes: Mapping[str, tuple[int, ...]], seed: int, last_layer: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    last_o_proj = f"{last_layer}self_attn.o_proj.weight"
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if kind == "e_score_correction_bias":
            weights[name] = 0.1 * values  # real checkpoints, and the library at any dtype, keep it in float32
            continue
        if kind.endswith("norm"):
            values = 1 + 0.1 * values
        elif kind == "bias":
            values = 0.1 * values
        else:
            fan_in = 1 if kind == "embed_tokens" else shape[-1]
            gain = LAST_O_PROJ_GAIN if name == last_o_proj else GAINS.get(kind, 1.0)
            values = gain * fan_in**-0.5 * values
        weights[name] = values.to(torch.bfloat16).float()
    return weights


def _prediction_layer(config: Any, seed: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a multi-token prediction layer (DeepSeek-V3, section 2.2), which has the number after the last.

    weights: of the other layers.
    """
    prefix, hidden = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")}
    shapes |= {f"{prefix}eh_proj.weight": (hidden, 2 * hidden), f"{prefix}shared_head.norm.weight": (hidden,)}
    layer = _drawn(shapes | _layer_shapes(config, prefix, DRAFT_LAYER), seed, prefix)
    if FAMILIES[config.model_type].repeats_vocabulary:
        layer[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        layer[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return layer


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name, [out, in] for projections. What a seed gives depends on their order."""
    vocabulary = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for layer, kind in enumerate(FAMILIES[config.model_type].layers(config)):
        shapes |= _layer_shapes(config, f"model.layers.{layer}.", kind)
    return shapes | {"model.norm.weight": (config.hidden_size,), "lm_head.weight": vocabulary}


def _layer_shapes(config: Any, prefix: str, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """Those of one layer, whose names begin with the prefix."""
    hidden, experts, index_dim = config.hidden_size, config.n_routed_experts, config.index_head_dim
    heads, q_rank, kv_rank = config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    attention = {
        "q_a_proj.weight": (q_rank, hidden),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "o_proj.weight": (hidden, heads * value),
    }
    indexer = {
        "indexer.wq_b.weight": (config.index_n_heads * index_dim, q_rank),
        "indexer.wk.weight": (index_dim, hidden),
        "indexer.k_norm.weight": (index_dim,),
        "indexer.k_norm.bias": (index_dim,),
        "indexer.weights_proj.weight": (config.index_n_heads, hidden),
    }
    mixture = {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,)}
    for name in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
        mixture |= _mlp_shapes(f"{name}.", hidden, config.moe_intermediate_size)
    dense = _mlp_shapes("", hidden, config.intermediate_size)

    attends = attention | indexer if kind.indexer else attention
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        **{f"{prefix}self_attn.{name}": shape for name, shape in attends.items()},
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        **{f"{prefix}mlp.{name}": shape for name, shape in (mixture if kind.mixture else dense).items()},
    }


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
