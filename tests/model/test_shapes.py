"""Directories for models of published widths, and weights that are made on the device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import tensors_of

from base.errors import StartupError
from cli.main import main
from model.families import ShapeName, published_config
from model.loader import load_model, read_spec
from model.tiny import write_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "layers", "index_layers", "context"),
    [("deepseek-v3.2", 61, 61, 163840), ("glm-5", 78, 78, 202752), ("glm-5.2", 78, 21, 1048576)],
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
    ("shape", "published"),
    [
        (
            "deepseek-v3.2",
            {
                "hidden_size": 7168,
                "num_attention_heads": 128,
                "intermediate_size": 18432,
                "vocab_size": 129280,
                "n_group": 8,
                "topk_group": 4,
                "q_lora_rank": 1536,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
                "index_n_heads": 64,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        (
            "glm-5",
            {
                "hidden_size": 6144,
                "num_attention_heads": 64,
                "intermediate_size": 12288,
                "vocab_size": 154880,
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": 2048,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "index_n_heads": 32,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        ),
    ],
)
def test_widths_are_those_of_the_published_models(shape: ShapeName, published: dict[str, Any]) -> None:
    published |= {
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pad_token_id": None,
    }
    config = published_config(shape)
    assert {key: config[key] for key in published} == published


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
