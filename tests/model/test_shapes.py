"""Directories for models of published widths, and weights that are made on the device."""

import json
from pathlib import Path

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
    ("shape", "hidden_size", "heads", "experts", "rope_theta"),
    [("deepseek-v3.2", 7168, 128, 256, 1e4), ("glm-5", 6144, 64, 256, 1e6)],
)
def test_widths_are_published(shape: ShapeName, hidden_size: int, heads: int, experts: int, rope_theta: float) -> None:
    """What tells them apart; all else comes from transformers."""
    config = published_config(shape)
    assert (config["hidden_size"], config["num_attention_heads"]) == (hidden_size, heads)
    assert (config["n_routed_experts"], config["dtype"]) == (experts, "bfloat16")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": rope_theta}


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
