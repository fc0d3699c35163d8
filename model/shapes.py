"""Configurations of published models, for nodes that are to have their widths and not their weights.

From the published config.json files. Which of its layers GLM-5.2 gives an indexer is known by number only; here it is
the first three and every fourth of the others.
"""

from collections.abc import Callable
from typing import Any, Literal

ShapeName = Literal["deepseek-v3.2", "glm-5", "glm-5.2"]

_DENSE_LAYERS = 3
_COMMON: dict[str, Any] = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


def _all_full(layer: int) -> str:
    return "full"


def _every_fourth_full(layer: int) -> str:
    return "full" if layer < _DENSE_LAYERS or layer % 4 == 2 else "shared"


_SHAPES: dict[ShapeName, tuple[dict[str, Any], Callable[[int], str]]] = {
    "deepseek-v3.2": (_DEEPSEEK, _all_full),
    "glm-5": (_GLM, _all_full),
    "glm-5.2": ({**_GLM, "max_position_embeddings": 1048576}, _every_fourth_full),
}


def published_config(name: ShapeName, layers: int | None = None, routed_experts: int | None = None) -> dict[str, Any]:
    """A published model's config.json, with fewer layers or experts where these are given.

    The first three layers are dense, as published, and the others mixtures of experts. Fewer experts than groups of
    them make one group. Raises ValueError for numbers that cannot be.
    """
    shape, indexer = _SHAPES[name]
    config = {**_COMMON, **shape}
    layers = config["num_hidden_layers"] if layers is None else layers
    experts = config["n_routed_experts"] if routed_experts is None else routed_experts
    if layers < 1 or experts < 1:
        raise ValueError(f"layers and routed_experts must be at least 1, not {layers} and {experts}")
    if experts % config["n_group"] or experts // config["n_group"] < 2:
        config |= {"n_group": 1, "topk_group": 1}
    config |= {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(config["num_experts_per_tok"], experts),
        "mlp_layer_types": ["dense" if layer < _DENSE_LAYERS else "sparse" for layer in range(layers)],
    }
    if config["model_type"] == "glm_moe_dsa":
        config["indexer_types"] = [indexer(layer) for layer in range(layers)]
    return config
