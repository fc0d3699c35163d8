"""Tiny random checkpoints with the architecture of the real ones, for demos and tests.

A directory as Hugging Face would have it: config, weights under the names of the real checkpoints, a byte-level
tokenizer and a chat template. The same arguments always give the same files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Family = Literal["deepseek_v32", "glm_moe_dsa"]

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BEGIN_ID, END_ID = 256, 257
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# With fewer index heads it is likely that every head's ReLU is zero for some positions. Their scores tie at exactly
# zero, and which of them make the top-k then depends on rounding: outputs would not be reproducible.
MIN_INDEX_HEADS = 16

# Factors of 1/sqrt(fan_in), by the weight's name; 1 for others. Two demands meet here. Outputs must depend on what is
# selected, or greedy decoding falls into short cycles and tests see no wrong selection: attention is sharp, and the
# last layer's is as strong as the embeddings. And rounding decides which of two positions with nearly equal index
# scores is selected (gaps of 5e-7 occur), which must not change tokens: each selected position is about one 64th of
# the attention, but in a layer that others follow, a moved hidden state moves later selections and experts too, and the
# change grows to the size of the logits. Weak attention and MLPs in all layers but the last keep it from growing.
GAINS = {"q_b_proj": 3.0, "o_proj": 0.1, "down_proj": 0.25}
LAST_O_PROJ_GAIN = 1.0


def write_tiny_checkpoint(
    path: Path,
    family: Family,
    seed: int,
    *,
    layers: int = 4,
    hidden_size: int = 64,
    index_topk: int = 64,
    index_n_heads: int = 32,
    max_position_embeddings: int = 8192,
) -> None:
    """Write a complete random checkpoint of about a million parameters into a directory.

    It is stored, and by default served, in float32, but its matrices and norms hold bfloat16 values: a bfloat16 run
    rounds none of them.

    The first layer is dense, the others are mixtures of experts. GLM's layers share selections: from the third on,
    every other layer reuses the selection of the layer before it. Raises ValueError for a shape that cannot work.
    """
    if layers < 1 or index_topk < 1 or max_position_embeddings < 1:
        raise ValueError(
            "layers, index_topk and max_position_embeddings must be at least 1, "
            f"not {layers}, {index_topk} and {max_position_embeddings}"
        )
    if hidden_size < 16:
        raise ValueError(f"hidden_size must be at least 16, not {hidden_size}")
    if index_n_heads < MIN_INDEX_HEADS:
        raise ValueError(
            f"index_n_heads must be at least {MIN_INDEX_HEADS}, not {index_n_heads}: with fewer heads index scores "
            "are often exactly zero, and ties in the top-k make outputs irreproducible"
        )
    config = _config(family, layers, hidden_size, index_topk, index_n_heads, max_position_embeddings)
    write_without_weights(path, config)
    save_file(_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})


def write_without_weights(path: Path, config: dict[str, Any]) -> None:
    """Write a directory with all that a checkpoint has but weights: for `--load-format dummy`.

    config: of config.json; its special tokens become those of the byte-level tokenizer.
    """
    path.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID}
    _write_json(path / "config.json", {**config, **special})
    _write_json(path / "generation_config.json", special)
    _write_tokenizer(path, config["max_position_embeddings"])


def _config(
    family: Family, layers: int, hidden_size: int, index_topk: int, index_n_heads: int, max_positions: int
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": hidden_size // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 48,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": index_topk,
        "index_n_heads": index_n_heads,
        "index_head_dim": 32,
        "max_position_embeddings": max_positions,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        # A padding token would make a zero embedding row, whose index scores all tie.
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if family == "deepseek_v32":
        config["architectures"] = ["DeepseekV32ForCausalLM"]
    else:
        config["architectures"] = ["GlmMoeDsaForCausalLM"]
        config["indexer_types"] = ["full" if i < 2 or i % 2 else "shared" for i in range(layers)]
    return config


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    last_o_proj = f"model.layers.{config['num_hidden_layers'] - 1}.self_attn.o_proj.weight"
    weights = {}
    for name, shape in _shapes(config):
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


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, [out, in] for projections."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, shape in _attention_shapes(config):
            yield f"{prefix}.self_attn.{name}", shape
        if config.get("indexer_types", ["full"] * (layer + 1))[layer] == "full":
            for name, shape in _indexer_shapes(config):
                yield f"{prefix}.self_attn.indexer.{name}", shape
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if config["mlp_layer_types"][layer] == "dense":
            yield from _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        experts, intermediate = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, intermediate)
        yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _attention_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "q_a_proj.weight", (q_rank, hidden)
    yield "q_a_layernorm.weight", (q_rank,)
    yield "q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", (kv_rank,)
    yield "kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield "o_proj.weight", (hidden, heads * value)


def _indexer_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, dim = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    yield "wq_b.weight", (heads * dim, config["q_lora_rank"])
    yield "wk.weight", (dim, hidden)
    yield "k_norm.weight", (dim,)
    yield "k_norm.bias", (dim,)
    yield "weights_proj.weight", (heads, hidden)


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def _write_tokenizer(path: Path, max_length: int) -> None:
    """A tokenizer whose token ids below 256 are the bytes of the text's UTF-8."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Bytes that print in Latin-1 stand for themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
