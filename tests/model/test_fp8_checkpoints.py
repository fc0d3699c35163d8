"""Checkpoints in block-fp8: loaded as they are published, they give the tokens of a copy in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import transformers
from damage import edit_weights, refusal
from model_caches import Session, assert_likeliest, random_tokens
from networks import tensors_of
from safetensors.torch import load_file, save_file

from base.errors import StartupError
from base.memory import human
from kernels.fp8 import dequantise
from kernels.operands import BlockFp8
from model import loader
from model.config import read_config
from model.families import FamilyName
from model.feed_forward import FeedForward, MixtureOfExperts
from model.loader import load_model
from model.network import Network
from model.shard import SINGLE_RANK, Shard
from model.stored_weights import StoredWeights, find_tensors
from model.tiny import write_tiny_checkpoint
from model.weights import Linear
from tests.dequantised import write_dequantised

CPU = torch.device("cpu")
NEW_TOKENS = 32
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 300, 700)
HIDDEN = 192
"""One and a half blocks."""


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def family(request: pytest.FixtureRequest) -> FamilyName:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["float", "ue8m0"])
def checkpoint(request: pytest.FixtureRequest, family: FamilyName, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_tiny_checkpoint(path, family, seed=3, hidden_size=HIDDEN, fp8=BlockFp8(request.param == "ue8m0"))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "model"
    write_tiny_checkpoint(path, "deepseek_v32", seed=3, layers=2, hidden_size=HIDDEN, fp8=BlockFp8())
    return path


@pytest.fixture
def damaged(one: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one, tmp_path / "damaged"))


def test_it_generates_what_transformers_generates_from_a_float32_copy(checkpoint: Path, tmp_path: Path) -> None:
    write_dequantised(checkpoint, tmp_path / "copy")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    prompts = random_tokens(5, *LENGTHS)
    model = load_model(checkpoint, torch.float32, CPU)
    assert_likeliest(reference, Session(model, prompts, NEW_TOKENS), NEW_TOKENS, 256)


def test_it_is_stored_as_published_checkpoints_are(checkpoint: Path, family: FamilyName) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    quantization = config["quantization_config"]
    assert {key: quantization[key] for key in ("quant_method", "fmt", "weight_block_size", "activation_scheme")} == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    stored = find_tensors(sorted(checkpoint.glob("*.safetensors")))
    assert {name: tensor.file.name for name, tensor in stored.items()} == index["weight_map"]
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3)]
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert (stored[kv_a].shape, stored[kv_a].dtype) == ((160, HIDDEN), torch.float8_e4m3fn)
    assert (stored[f"{kv_a}_scale_inv"].shape, stored[f"{kv_a}_scale_inv"].dtype) == ((2, 2), torch.float32)
    (left_out,) = quantization["modules_to_not_convert"]
    for name in (f"{left_out}.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"):
        assert stored[name].dtype == torch.bfloat16
        assert f"{name}_scale_inv" not in stored
    assert any(name.startswith(f"model.layers.{config['num_hidden_layers']}.") for name in stored)
    scales = load_file(checkpoint / index["weight_map"][f"{kv_a}_scale_inv"])[f"{kv_a}_scale_inv"]
    powers = bool((scales == 2 ** scales.log2().round()).all())
    assert powers == (quantization.get("scale_fmt") == "ue8m0")


def test_prediction_layers_are_skipped_and_counted(one: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        load_model(one, torch.float32, CPU)
    count = sum("model.layers.2." in name for name in find_tensors(sorted(one.glob("*.safetensors"))))
    assert {"event": "multi-token prediction layers are not loaded", "weights": count, "log_level": "info"} in logs
    assert not any("does not know" in entry["event"] for entry in logs)


def test_weights_that_are_not_known_are_named(damaged: Path) -> None:
    weights = load_file(damaged / "model-00001-of-000003.safetensors")
    weights["model.layers.0.self_attn.extra.weight"] = torch.ones(3)
    save_file(weights, damaged / "model-00001-of-000003.safetensors")
    with structlog.testing.capture_logs() as logs:
        load_model(damaged, torch.float32, CPU)
    (warning,) = (entry for entry in logs if "does not know" in entry["event"])
    assert warning["weights"] == "1 weights: model.layers.0.self_attn.extra.weight"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("layers.0.self_attn.o_proj.weight_scale_inv", None, "lacks 1 weights: {}"),
        (
            "layers.2.self_attn.o_proj.weight",
            None,
            "has scales without the weights that they belong to: 1 weights: {}_scale_inv",
        ),
        ("layers.0.self_attn.o_proj.weight_scale_inv", torch.ones(3, 1), "{} is [3, 1] instead of [2, 1]"),
        ("norm.weight", torch.ones(HIDDEN, dtype=torch.int8), "has {} in I8; served are"),
    ],
    ids=["no scales", "no weight", "another shape", "another type"],
)
def test_weights_and_scales_that_do_not_belong_together_are_refused(
    damaged: Path, name: str, changed: torch.Tensor | None, message: str
) -> None:
    edit_weights(damaged, **{f"model.{name}": changed})
    assert message.format(f"model.{name}") in refusal(damaged)


def test_a_checkpoint_that_does_not_fit_is_refused_unread(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(tensor.nbytes for tensor in tensors_of(load_model(one, torch.float32, CPU).network))
    monkeypatch.setattr(loader, "available_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(StoredWeights, "fill", lambda *_: pytest.fail("something was read"))
    assert refusal(one) == f"the weights of {one} take {human(total)}, but cpu has 1.00 MiB free"


def test_quantising_needs_a_device_that_computes_in_fp8(one: Path) -> None:
    with pytest.raises(StartupError, match="--quantization fp8: needs a GPU that multiplies fp8 numbers"):
        load_model(one, torch.bfloat16, CPU, quantization="fp8")


def network(path: Path, shard: Shard = SINGLE_RANK, quantises: bool = False) -> Network:
    weights = StoredWeights(
        find_tensors(sorted(path.glob("*.safetensors"))), CPU, torch.bfloat16, keeps=BlockFp8(), quantises=quantises
    )
    made = Network.load(weights, read_config(path), shard)
    assert not weights.missing
    assert not weights.misshapen
    weights.fill()
    return made


def test_projections_stay_in_fp8_side_by_side(one: Path, tmp_path: Path) -> None:
    write_dequantised(one, tmp_path / "copy")
    exact = load_file(tmp_path / "copy" / "model.safetensors")
    first, last = network(one).layers
    name = "model.layers.1.mlp.experts"
    assert isinstance(last.mlp, MixtureOfExperts)
    assert last.mlp.gate_up.weight.dtype == torch.bfloat16, "a gate of 96 rows ends within a block"
    for number, weight in enumerate(last.mlp.gate_up.weight[:8]):
        parts = [exact[f"{name}.{number}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(weight, torch.cat(parts).bfloat16())
        assert torch.equal(last.mlp.down.weight[number], exact[f"{name}.{number}.down_proj.weight"].bfloat16())
    assert first.attention.out.weight.dtype == torch.float8_e4m3fn
    out = dequantise(first.attention.out.weight, scales_of(first.attention.out), torch.float32)
    assert torch.equal(out, exact["model.layers.0.self_attn.o_proj.weight"])
    assert isinstance(first.mlp, FeedForward)
    gate_up = dequantise(first.mlp.gate_up.weight, scales_of(first.mlp.gate_up), torch.float32)
    assert torch.equal(gate_up, torch.cat([exact[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]))


def scales_of(linear: Linear) -> torch.Tensor:
    assert linear.scales is not None
    return linear.scales


def test_a_process_loads_its_experts_only(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=3, layers=2, hidden_size=256, fp8=BlockFp8())
    whole, part = (network(tmp_path, shard).layers[1].mlp for shard in (SINGLE_RANK, Shard(3, 4)))
    assert isinstance(whole, MixtureOfExperts)
    assert isinstance(part, MixtureOfExperts)
    assert part.first == 6
    assert part.number == 2
    assert torch.equal(part.down.weight.view(torch.uint8), whole.down.weight[6:].view(torch.uint8)), "shared: the last"
    assert torch.equal(scales_of(part.down), scales_of(whole.down)[6:])
    write_dequantised(tmp_path, tmp_path / "copy")
    exact = load_file(tmp_path / "copy" / "model.safetensors")
    for number in (6, 7):
        name = f"model.layers.1.mlp.experts.{number}"
        weight, scales = part.gate_up.weight[number - 6], scales_of(part.gate_up)[number - 6]
        expected = torch.cat([exact[f"{name}.{half}_proj.weight"] for half in ("gate", "up")])
        assert torch.equal(dequantise(weight, scales, torch.float32), expected)
    assert torch.equal(part.router.weight, whole.router.weight)


def test_a_bfloat16_checkpoint_becomes_fp8_while_it_loads(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=1, layers=2, hidden_size=384)
    exact = load_file(tmp_path / "model.safetensors")
    layer = network(tmp_path, quantises=True).layers[0]
    assert isinstance(layer.mlp, FeedForward)
    loaded = dequantise(layer.mlp.gate_up.weight, scales_of(layer.mlp.gate_up), torch.float32)
    expected = torch.cat([exact[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    largest = torch.nn.functional.max_pool2d(expected.abs()[None], 128)[0].repeat_interleave(128, 0)
    # Four bits of a number, or the least step of its block.
    allowed = torch.maximum(expected.abs() * 2**-4, largest.repeat_interleave(128, 1) * 2**-9 / 448)
    assert ((loaded - expected).abs() <= allowed).all()
    assert layer.attention.key_map.dtype == torch.bfloat16
