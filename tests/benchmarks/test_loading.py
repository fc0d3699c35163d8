"""The checkpoint that the loading benchmark writes is one that loads."""

import json
from pathlib import Path

import pytest
import structlog

from benchmarks import loading
from benchmarks.loading import main
from model.families import published_config


def small(path: Path) -> dict[str, object]:
    del path
    config = published_config("deepseek-v3.2", 4, 8)
    narrow = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 320}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "index_n_heads": 16}
    return config | narrow | attention


def test_what_is_written_is_loaded_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(loading, "_RANDOM_BYTES", 1 << 16)
    monkeypatch.setattr(loading, "published_config", lambda *_: small(tmp_path))
    directory = tmp_path / "checkpoint"
    with structlog.testing.capture_logs() as logs:
        main(directory, layers=4, routed_experts=8, device="cpu")
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.layers.3.mlp.experts.7.down_proj.weight_scale_inv"] in {f.name for f in files}
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    out = capsys.readouterr().out
    assert out.count("loading, cached") == 2
    assert out.count("dd, not cached") == 2
    assert "loading, not cached" in out
