import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_caches import Session
from networks import tensors_of
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from base.errors import StartupError
from cli.main import main
from kernels.attention import AttentionBackend
from kernels.kv_format import KVFormat
from kernels.operands import IndexQueries, PagedKeys
from model.loader import load_model, read_spec, resolve_dtype
from model.sparse_model import SparseModel
from model.tiny import write_tiny_checkpoint

Continuation = Callable[[torch.Tensor, int], list[int]]


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def test_the_same_seed_gives_the_same_files(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v32", seed=1, layers=5)
    for file in checkpoints["deepseek_v32"].iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_a_larger_vocabulary_is_learned_from_text_and_still_has_every_byte(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=2, layers=2, vocab_size=700)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|user|>    def return_value(self):\n        return self.value  # 你🙂\x00<|end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(ids) < len(text.encode()) / 2
    assert [ids[0], ids[-1]] == [259, 257]
    assert sorted(tokenizer.get_vocab().values()) == list(range(700))
    assert load_model(tmp_path, torch.float32, torch.device("cpu")).spec.vocab_size == 700


def test_greedy_outputs_vary(continuation: Continuation) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 256, (n,), generator=generator) for n in (5, 30, 70, 200)]
    outputs = [continuation(prompt, 64) for prompt in prompts]
    assert all(len(set(output)) >= 20 for output in outputs)
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_an_early_token_of_the_prompt_changes_the_output(continuation: Continuation) -> None:
    prompt = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(6))
    changed = prompt.clone()
    changed[2] = (changed[2] + 1) % 256
    assert continuation(prompt, 32) != continuation(changed, 32)


def test_a_wrong_selection_in_any_layer_changes_the_output(checkpoint: Path, model: SparseModel) -> None:
    """Otherwise parity with the reference would say little about selection."""
    prompt = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(7))
    right = Session(model, [prompt], 32).generate(32, 300)
    for wrong_layer in range(model.spec.num_index_layers):
        backend = SelectsTheWindow(model.spec.kv_format, wrong_layer, model.spec.num_index_layers)
        wrong = load_model(checkpoint, torch.float32, model.device, backend=backend)
        assert Session(wrong, [prompt], 32).generate(32, 300) != right, wrong_layer


class SelectsTheWindow(AttentionBackend):
    """In one index layer the newest positions, whatever their scores, in passes over a single request."""

    def __init__(self, kv_format: KVFormat, wrong_layer: int, num_index_layers: int) -> None:
        super().__init__(kv_format)
        self._wrong_layer = wrong_layer
        self._index_layers = itertools.cycle(range(num_index_layers))

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        right = super().select_for_prompt(index, keys, start, sequence_length, topk)
        newest = torch.arange(start, start + len(right)).unsqueeze(1) - torch.arange(right.shape[1])
        return newest.clamp(min=-1) if next(self._index_layers) == self._wrong_layer else right

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        right = super().select_for_decode(index, pages, topk)
        newest = pages.seq_lens.unsqueeze(1) - 1 - torch.arange(right.shape[1])
        return newest if next(self._index_layers) == self._wrong_layer else right


def test_weights_are_float32_with_bfloat16_values(checkpoint: Path) -> None:
    assert resolve_dtype(checkpoint, "auto") == torch.float32
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        assert weight.dtype == torch.float32, name
        exempt = name.endswith("e_score_correction_bias")  # float32 in every run
        assert exempt or torch.equal(weight, weight.bfloat16().float()), name


@settings(max_examples=100)
@given(text=st.text().filter(lambda text: "<|" not in text))
def test_any_text_survives_tokenization(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"index_topk": 0}, "index_topk"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"index_n_heads": 15}, "ties"),
    ],
)
def test_shapes_that_cannot_work_are_refused(tmp_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_checkpoint(tmp_path / "tiny", "deepseek_v32", 0, **arguments)
    assert not (tmp_path / "tiny").exists()


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
