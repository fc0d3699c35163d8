"""The model path gives the tokens of transformers' own generate(), however the work is cut up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_caches import Session
from transformers import AutoModelForCausalLM, PreTrainedModel

from kernels import attention
from model.loader import load_model
from model.sparse_model import SparseModel

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 300, 1200)  # around a page, around the top-k of 64, and well past it
NEW_TOKENS = 32

Continuation = Callable[[torch.Tensor, int], list[int]]


def random_tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    return [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(prompts: list[torch.Tensor], continuation: Continuation) -> list[list[int]]:
    return [continuation(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("page_size", "chunk_size"),
    [(1, 100), (16, 64), (16, 65), (64, 2000)],
)
def test_a_batch_generates_the_reference_tokens(
    model: SparseModel,
    prompts: list[torch.Tensor],
    expected: list[list[int]],
    page_size: int,
    chunk_size: int,
) -> None:
    assert Session(model, prompts, NEW_TOKENS, page_size).generate(NEW_TOKENS, chunk_size) == expected


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[f"length={n}" for n in LENGTHS])
def test_a_request_alone_generates_the_reference_tokens(
    model: SparseModel, prompts: list[torch.Tensor], expected: list[list[int]], index: int
) -> None:
    assert Session(model, [prompts[index]], NEW_TOKENS).generate(NEW_TOKENS, 256) == [expected[index]]


def test_one_call_may_hold_chunks_at_different_places_of_their_prompts(
    model: SparseModel, prompts: list[torch.Tensor], expected: list[list[int]]
) -> None:
    session = Session(model, prompts, NEW_TOKENS)
    one, sixty_five, three_hundred, twelve_hundred = (LENGTHS.index(length) for length in (1, 65, 300, 1200))
    session.model.prefill([session.chunk(three_hundred, 0, 170)])
    session.model.prefill([session.chunk(twelve_hundred, 0, 900), session.chunk(sixty_five, 0, 1)])
    session.model.prefill(
        [
            session.chunk(sixty_five, 1, 64),
            session.chunk(twelve_hundred, 900, 1199),
            session.chunk(three_hundred, 170, 299),
        ]
    )
    chosen = [one, sixty_five, three_hundred, twelve_hundred]
    logits = session.decode(torch.stack([prompts[request][-1] for request in chosen]), -1, chosen)
    assert logits.argmax(dim=-1).tolist() == [expected[request][0] for request in chosen]


def test_results_do_not_depend_on_the_memory_budget(
    model: SparseModel, prompts: list[torch.Tensor], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CPU_BLOCK_BYTES", 100_000)
    assert Session(model, prompts[-3:-1], 4).generate(4, 128) == [tokens[:4] for tokens in expected[-3:-1]]


def test_yarn_scaled_rope_matches(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = random_tokens(7, 200)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert network.model.layers[0].self_attn.scaling != network.model.layers[0].self_attn.qk_head_dim ** -0.5
    logits = Session(ours, [prompt], 1).prefill(77)
    torch.testing.assert_close(logits, last_logits(network, prompt), rtol=0, atol=1e-3)


def last_logits(network: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        ids = prompt.unsqueeze(0)
        return network(ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float()


def test_bfloat16_is_as_close_to_float32_as_the_reference_is(checkpoint: Path, reference: PreTrainedModel) -> None:
    steps = 16
    rounded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ours = load_model(checkpoint, torch.bfloat16, torch.device("cpu"))
    our_errors, their_errors = [], []
    for seed in range(6):
        sequence = random_tokens(seed, 40 + 50 * seed + steps)
        prompt, forced = sequence[:-steps], sequence[-steps:]
        exact = forced_logits(reference, prompt, forced)
        session = Session(ours, [prompt], steps)
        logits = [session.prefill(64)] + [session.decode(forced[i : i + 1], i) for i in range(steps)]
        our_errors.append((torch.cat(logits) - exact).abs())
        their_errors.append((forced_logits(rounded, prompt, forced) - exact).abs())
    ours_all, theirs_all = torch.cat(our_errors), torch.cat(their_errors)
    assert ours_all.mean() <= 1.5 * theirs_all.mean()
    assert ours_all.quantile(0.99) <= 1.5 * theirs_all.quantile(0.99)


def forced_logits(network: PreTrainedModel, prompt: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """The reference's logits after the prompt and after each of the tokens that are then forced on it."""
    with torch.no_grad():
        ids = prompt.unsqueeze(0)
        output = network(ids, attention_mask=torch.ones_like(ids), use_cache=True)
        logits = [output.logits[:, -1]]
        for i in range(len(forced)):
            output = network(
                forced[i].view(1, 1),
                attention_mask=torch.ones(1, len(prompt) + i + 1, dtype=torch.int64),
                past_key_values=output.past_key_values,
            )
            logits.append(output.logits[:, -1])
        return torch.cat(logits).float()
