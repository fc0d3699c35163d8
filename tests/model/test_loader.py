import io
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from damage import edit_config, edit_weights, refusal
from networks import tensors_of
from safetensors.torch import load_file, save_file

from base.errors import StartupError
from model import stored_weights
from model.config import ModelSpec
from model.loader import load_model, load_progress, read_spec
from model.stored_weights import StoredTensor, StoredWeights
from model.tiny import write_tiny_checkpoint
from model.weights import RandomWeights

CPU = torch.device("cpu")


@pytest.fixture
def damaged(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged by the test."""
    return Path(shutil.copytree(checkpoints["glm_moe_dsa"], tmp_path / "damaged"))


def shard(path: Path) -> list[str]:
    """Split the weights into two files and an index, as large checkpoints are."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = sorted(weights)
    for number, file in enumerate(shards):
        save_file({name: weights[name] for name in names[number::2]}, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shards[i % 2] for i, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards


def test_the_spec_describes_the_checkpoint(checkpoints: dict[str, Path]) -> None:
    spec = read_spec(checkpoints["glm_moe_dsa"], torch.bfloat16)
    assert spec == ModelSpec(
        model_type="glm_moe_dsa",
        num_layers=5,
        index_layer_of=(0, 1, 1, 2, 2),
        item_dim=64,
        latent_dim=48,
        index_dim=32,
        index_topk=64,
        vocab_size=261,
        context_length=8192,
        dtype=torch.bfloat16,
        fingerprint=spec.fingerprint,
    )
    assert read_spec(checkpoints["deepseek_v32"], torch.float32).index_layer_of == (0, 1, 2, 3, 4)


def test_loading_gives_the_spec_and_the_dtype(checkpoint: Path) -> None:
    model = load_model(checkpoint, torch.bfloat16, CPU, context_length=100)
    assert model.spec == read_spec(checkpoint, torch.bfloat16, 100)
    assert model.spec.context_length == 100
    assert model.device == CPU


def test_beside_the_tensors_only_some_pieces_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v32", seed=1, draft_layer=False, layers=3, hidden_size=1024)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    monkeypatch.setattr(stored_weights, "_PIECE_BYTES", num_bytes // 100)
    load_model(tmp_path, torch.bfloat16, CPU)  # what is imported at a first use
    with most_anonymous_memory() as most:
        model = load_model(tmp_path, torch.bfloat16, CPU)
    assert sum(tensor.nbytes for tensor in tensors_of(model.network)) >= num_bytes / 2
    assert most() < 0.75 * num_bytes


@contextmanager
def most_anonymous_memory() -> Iterator[Callable[[], int]]:
    """Watches this process while it lasts: the most bytes without a file behind them, beyond those at the start."""

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    start = most = anonymous()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most - start
    finally:
        ended.set()
        watcher.join()


@pytest.mark.parametrize("context_length", [0, -5, 8193])
def test_a_context_that_the_model_cannot_hold_is_refused(checkpoint: Path, context_length: int) -> None:
    with pytest.raises(StartupError, match=f"8192, not {context_length}"):
        read_spec(checkpoint, torch.float32, context_length)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "nowhere: no such directory; give"), ("", "no config.json; give")]
)
def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, name: str, message: str) -> None:
    assert message in refusal(tmp_path / name)


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(damaged: Path, content: str) -> None:
    (damaged / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(damaged)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"model_type": name}, f"its model_type is {name!r}; supported: deepseek_v32, glm_moe_dsa")
            for name in ("llama", None, 3)
        ),
        ({"q_lora_rank": None}, "q_lora_rank null"),
        ({"model_type": ["glm_moe_dsa"]}, "its model_type is ['glm_moe_dsa']"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str (value: 'wide')"),
        (
            {"num_hidden_layers": 0, "layer_types": [], "mlp_layer_types": [], "indexer_types": []},
            "num_hidden_layers must be at least 1, not 0",
        ),
        *(
            ({name: value}, f"{name} must be at least 1, not {value}")
            for name, value in (("hidden_size", 0), ("kv_lora_rank", -1), ("n_group", 0), ("index_topk", 0))
        ),
        ({"n_shared_experts": -1}, "n_shared_experts must be at least 0, not -1"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be a number of layers, not '1'"),
        ({"index_head_dim": 8}, "qk_rope_head_dim must be even and at most index_head_dim (8), not 16"),
        ({"qk_rope_head_dim": 3}, "must be even and at most index_head_dim (32), not 3"),
        *(
            (changes, "n_routed_experts 8 must be equal groups of at least 2")
            for changes in ({"n_group": 3}, {"n_group": 8}, {"topk_group": 2}, {"num_experts_per_tok": 9})
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1"}}, "rope_theta of rope_parameters must be a"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}}, "a number above 0, not 0"),
        ({"attention_bias": True}, "attention_bias True is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ({"indexer_types": ["shared"] * 5}, "the first one 'full'"),
        ({"indexer_types": ["full"] * 4}, "each of its 5 layers"),
        ({"indexer_types": ["full"] * 4 + ["none"]}, "'full' or 'shared'"),
        ({"quantization_config": GPTQ}, "has quantised weights (quantization_config: gptq), which are not served"),
        ({"quantization_config": PACKED}, "(quantization_config: compressed-tensors), which are not served"),
        ({"compression_config": PACKED}, "(compression_config: compressed-tensors), which are not served"),
        ({"quantization_config": "fp8"}, "(quantization_config: fp8), which are not served"),
        *(
            ({"quantization_config": {**BLOCK_FP8, name: value}}, f"has weights in fp8 with {name} {value}, which are")
            for name, value in (
                ("weight_block_size", [64, 64]),
                ("weight_block_size", None),
                ("activation_scheme", "static"),
                ("fmt", "e5m2"),
                ("scale_fmt", "e4m3"),
            )
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(damaged: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(damaged, **changes)
    assert message in refusal(damaged)


def test_a_config_that_names_no_quantisation_is_served(damaged: Path) -> None:
    edit_config(damaged, quantization_config=None)
    assert read_spec(damaged, torch.bfloat16).num_layers == 5


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    file = path / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))


def without_weight_map(path: Path) -> None:
    shard(path)
    (path / "model.safetensors.index.json").write_text("{}")


def with_a_file_elsewhere(path: Path) -> None:
    elsewhere = path.parent / "elsewhere.safetensors"
    shutil.copy(path / "model.safetensors", elsewhere)
    (path / "model.safetensors").unlink()
    weight_map = dict.fromkeys(load_file(elsewhere), "../elsewhere.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_a_weight_twice(path: Path) -> None:
    _, file = shard(path)
    save_file({**load_file(path / file), "model.norm.weight": torch.ones(64)}, path / file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "expected model.safetensors or model.safetensors.index"),
        (lambda path: (path / shard(path)[1]).unlink(), "lacks 1 of the 2 weight files that model.safetensors.index"),
        (without_weight_map, "has no weight_map"),
        (with_a_file_elsewhere, "lacks 1 of the 1 weight files that model.safetensors.index.json names: ../elsewhere"),
        (with_a_weight_twice, "has model.norm.weight, as model-00001-of-00002.safetensors does"),
        (lambda path: rewrite(path, lambda content: content[:-10]), "bytes long by its header, but it is"),
        (lambda path: rewrite(path, lambda content: content[:100]), "header is cut off"),
        (lambda path: rewrite(path, lambda content: b""), "header is cut off"),
        (lambda path: rewrite(path, lambda content: content[:8] + b"x" * (len(content) - 8)), "header is not valid"),
        *(
            (lambda path, old=old, new=new: rewrite(path, lambda content: content.replace(old, new)), "is not valid")
            for old, new in ((b'"dtype"', b'"dtypo"'), (b'"shape":[64]', b'"shape":"64"'), (b"_offsets", b"_offsetz"))
        ),
        (lambda path: edit_weights(path, **{"model.norm.weight": None}), "lacks 1 weights: model.norm.weight"),
        (
            lambda path: edit_weights(path, **{"model.norm.weight": torch.ones(3)}),
            "has weights of other shapes: model.norm.weight is [3] instead of [64]",
        ),
    ],
)
def test_damaged_weight_files_are_refused(damaged: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(damaged)
    assert message in refusal(damaged)


def test_the_fingerprint_tells_models_apart(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "again", "glm_moe_dsa", seed=1, layers=5)
    write_tiny_checkpoint(tmp_path / "seed", "glm_moe_dsa", seed=2, layers=5)
    write_tiny_checkpoint(tmp_path / "topk", "glm_moe_dsa", seed=1, layers=5, index_topk=32)
    paths = [*checkpoints.values(), tmp_path / "seed", tmp_path / "topk"]
    fingerprints = [read_spec(path, torch.float32).fingerprint for path in paths]
    assert len(set(fingerprints)) == 4
    assert all(len(fingerprint) == 16 for fingerprint in fingerprints)
    again = read_spec(tmp_path / "again", torch.bfloat16, 10).fingerprint
    assert again == read_spec(checkpoints["glm_moe_dsa"], torch.float32).fingerprint


def test_the_fingerprint_ignores_who_saved_the_config(damaged: Path) -> None:
    before = read_spec(damaged, torch.float32).fingerprint
    edit_config(damaged, transformers_version="5.0.0", _name_or_path="elsewhere", dtype="float32", use_cache=False)
    assert read_spec(damaged, torch.float32).fingerprint == before


@pytest.mark.parametrize("place", ["head", "middle", "tail"])
def test_the_fingerprint_sees_a_changed_byte_at_the_sampled_places(damaged: Path, place: str) -> None:
    file = damaged / "model.safetensors"
    content = bytearray(file.read_bytes())
    before = read_spec(damaged, torch.float32).fingerprint
    data_begin = 8 + int.from_bytes(content[:8], "little")
    offset = {"head": data_begin, "middle": (data_begin + len(content)) // 2, "tail": len(content) - 1}[place]
    content[offset] ^= 1
    file.write_bytes(content)
    assert read_spec(damaged, torch.float32).fingerprint != before


@pytest.mark.parametrize(
    ("stored", "served", "kept"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_head_weights_are_not_rounded(stored: torch.dtype, served: torch.dtype, kept: torch.dtype) -> None:
    held = StoredTensor("weights_proj", Path("file"), 0, stored, (4, 8))
    weights = StoredWeights({"weights_proj": held}, torch.device("meta"), served)
    assert weights.unrounded("weights_proj", (4, 8)).dtype == kept
    assert RandomWeights(CPU, served).unrounded("weights_proj", (4, 8)).dtype == served


GIB = 1 << 30


def test_a_log_has_a_line_for_every_tenth_and_one_for_the_end() -> None:
    with structlog.testing.capture_logs() as logs, load_progress("loading weights", 40 * GIB) as advance:
        for _ in range(80):
            advance(GIB // 2)
    assert [entry["done"] for entry in logs[:-1]] == [f"{tenth}0%" for tenth in range(1, 10)]
    assert (logs[-1]["event"], logs[-1]["read"]) == ("loading weights: done", "40.00 GiB")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_instead_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with structlog.testing.capture_logs() as logs, load_progress("loading weights", 40 * GIB) as advance:
        advance(20 * GIB)
        advance(20 * GIB)
    assert len(logs) == 1
    assert "loading weights" in terminal.getvalue()
    assert "42.9/42.9 GB" in terminal.getvalue()
