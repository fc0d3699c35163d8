"""The published shapes, and the configs that they stand for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from base.errors import StartupError
from kernels.operands import BlockFp8
from model.config import network_config, read_config
from model.families import ShapeName, published_config


@pytest.mark.parametrize(
    ("shape", "hidden_size", "heads", "experts", "rope_theta"),
    [
        ("deepseek-v3.2", 7168, 128, 256, 1e4),
        ("glm-5", 6144, 64, 256, 1e6),
        ("glm-5.2", 6144, 64, 256, 8e6),
        ("glm-5.3", 6144, 64, 256, 8e6),
    ],
)
def test_widths_are_published(shape: ShapeName, hidden_size: int, heads: int, experts: int, rope_theta: float) -> None:
    """What tells them apart; all else comes from transformers."""
    config = published_config(shape)
    assert (config["hidden_size"], config["num_attention_heads"]) == (hidden_size, heads)
    assert (config["n_routed_experts"], config["dtype"]) == (experts, "bfloat16")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": rope_theta}


GLM_5_3 = """{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "transformers_version": "5.15.0",
"dtype": "bfloat16", "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 154880,
"hidden_size": 6144, "intermediate_size": 12288, "tie_word_embeddings": false, "num_hidden_layers": 78,
"num_nextn_predict_layers": 1, "num_attention_heads": 64, "head_dim": 192, "kv_lora_rank": 512, "q_lora_rank": 2048,
"qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": true,
"indexer_rope_interleave": true, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
"max_position_embeddings": 1048576, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": null, "index_share_for_mtp_iteration": true,
"first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "moe_router_dtype": "float32",
"n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
"norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
"weight_block_size": [128, 128]}}"""
"""What its config.json has, as published, of what is read here, but for two lists with an entry for each layer."""


def test_the_config_of_glm_5_3_is_that_of_its_shape(tmp_path: Path) -> None:
    indexers = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3
    lists = {"indexer_types": indexers, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(GLM_5_3) | lists))
    read = read_config(tmp_path)
    assert read.quantization == BlockFp8(power_of_two=False)
    assert replace(read, quantization=None) == network_config(AutoConfig.for_model(**published_config("glm-5.3")))


def test_glm_5_3_flash_is_refused_by_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm5_next"}')
    with pytest.raises(StartupError, match=r"its model_type is 'glm5_next'; supported: deepseek_v32, glm_moe_dsa"):
        read_config(tmp_path)
