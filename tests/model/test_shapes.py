"""Directories for models of published widths, and weights that are made on the device."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks import tensors_of
from transformers import AutoConfig

from base.errors import StartupError
from cli.main import main
from kernels.operands import BlockFp8
from model.config import network_config, read_config
from model.families import ShapeName, published_config
from model.loader import load_model, read_spec
from model.tiny import write_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "layers", "index_layers", "context"),
    [
        ("deepseek-v3.2", 61, 61, 163840),
        ("glm-5", 78, 78, 202752),
        ("glm-5.2", 78, 21, 1048576),
        ("glm-5.3", 78, 21, 1048576),
    ],
)
def test_a_directory_of_published_widths_has_the_kv_of_the_model(
    shape: str, layers: int, index_layers: int, context: int, tmp_path: Path
) -> None:
    main_exits_well("tiny-model", str(tmp_path / "m"), "--shape", shape, "--config-only")
    spec = read_spec(tmp_path / "m", torch.bfloat16, load_format="dummy")
    assert (spec.num_layers, spec.num_index_layers, spec.context_length) == (layers, index_layers, context)
    assert (spec.kv_layout.item_bytes, spec.kv_layout.index_key_bytes, spec.index_topk) == (1152, 256, 2048)
    with pytest.raises(StartupError, match="has no weights"):
        read_spec(tmp_path / "m", torch.bfloat16)


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


def test_fewer_layers_and_experts(tmp_path: Path) -> None:
    main_exits_well(
        *("tiny-model", str(tmp_path / "m"), "--shape", "deepseek-v3.2", "--layers", "5", "--routed-experts", "4"),
        "--config-only",
    )
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["n_routed_experts"], config["num_experts_per_tok"]) == (5, 4, 4)
    assert (config["n_group"], config["mlp_layer_types"]) == (1, ["dense"] * 3 + ["sparse"] * 2)


@pytest.mark.parametrize("words", [["--config-only"], ["--shape", "glm-5"]])
def test_a_shape_comes_without_weights_and_nothing_else_does(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["tiny-model", str(tmp_path / "m"), *words])
    assert exit_.value.code == 2
    assert not (tmp_path / "m").exists()


def test_dummy_weights_are_the_same_each_time_and_need_no_files(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=1)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load_model(tmp_path, torch.float32, CPU, load_format="dummy") for _ in range(2))
    weights = [list(tensors_of(model.network)) for model in (first, second)]
    assert len(weights[0]) > 50
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert all(bool(weight.isfinite().all()) for weight in weights[0])
    assert first.spec.fingerprint == second.spec.fingerprint


def main_exits_well(*words: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    assert exit_.value.code == 0
