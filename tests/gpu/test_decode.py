"""Decoding on a CUDA device through the KV tiers, against transformers on the same device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from control.messages import Sampling
from engine.runner import LaunchedStep
from hisparse.step import SwapInMismatchError
from model.families import FamilyName
from model.loader import choose_backend, load_model, read_spec
from model.tiny import write_tiny_checkpoint
from tests.gpu.tiered_session import CUDA, GREEDY, TieredSession, session

FAMILIES: tuple[FamilyName, ...] = ("deepseek_v32", "glm_moe_dsa")
# Around a page, the top-k of 64 and the hot buffer of 128.
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 126, 127, 128, 129, 130, 500, 1200)
NEW_TOKENS = 32
CONTEXT = 8192

either_way = pytest.mark.parametrize("record", [False, True], ids=["eager", "recorded"])


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    write_tiny_checkpoint(path, request.param, seed=1, layers=5)
    return path


def load_reference(checkpoint: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval().to(CUDA)


def random_tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def generate(ours: TieredSession, new_tokens: int) -> list[list[int]]:
    """Greedy continuations; each step has some of the requests that are not finished, so that batches differ."""
    rng = random.Random(0)
    tokens = [[int(logits.argmax())] for logits in ours.prefill()]
    while unfinished := [number for number, made in enumerate(tokens) if len(made) < new_tokens]:
        numbers = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        logits = ours.decode(numbers, [tokens[number][-1] for number in numbers])
        for number, token in zip(numbers, logits.argmax(-1).tolist(), strict=True):
            tokens[number].append(token)
    return tokens


@either_way
def test_batches_of_any_size_generate_the_reference_tokens(checkpoint: Path, record: bool) -> None:
    network = load_reference(checkpoint, torch.float32)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = []
    for prompt in prompts:
        ids = prompt.to(CUDA)[None]
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )
        expected.append(output[0, len(prompt) :].tolist())
    model = load_model(checkpoint, torch.float32, CUDA)
    with session(model, prompts, CONTEXT, record, verify=True) as ours:
        assert generate(ours, NEW_TOKENS) == expected
        assert ours.coordinator.counters().misses > 0


@either_way
def test_bfloat16_is_as_close_to_float32_as_the_reference_is(checkpoint: Path, record: bool) -> None:
    """Teacher-forced, over sequences that outgrow the hot buffer."""
    steps = 16
    exact, rounded = (load_reference(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    backend = choose_backend("auto", CUDA, read_spec(checkpoint, torch.bfloat16))
    model = load_model(checkpoint, torch.bfloat16, CUDA, backend=backend)
    sequences = [random_tokens(seed, 40 + 25 * seed + steps) for seed in range(12)]
    with session(model, [sequence[:-steps] for sequence in sequences], CONTEXT, record, verify=True) as ours:
        logits = [ours.prefill().clone()]
        for at in range(-steps, 0):
            forced = [int(sequence[at]) for sequence in sequences]
            logits.append(ours.decode(range(len(sequences)), forced).clone())
    truth = torch.stack([forced_logits(exact, sequence, steps) for sequence in sequences])
    theirs = torch.stack([forced_logits(rounded, sequence, steps) for sequence in sequences])
    our_errors, their_errors = (torch.stack(logits, 1) - truth).abs(), (theirs - truth).abs()
    assert our_errors.mean() <= 1.5 * their_errors.mean()
    assert our_errors.flatten().quantile(0.99) <= 1.5 * their_errors.flatten().quantile(0.99)


def forced_logits(network: Any, sequence: torch.Tensor, steps: int) -> torch.Tensor:
    """The reference's logits after the prompt and after each of the `steps` tokens behind it."""
    ids = sequence.to(CUDA)[None]
    with torch.no_grad():
        logits = network(ids, attention_mask=torch.ones_like(ids)).logits
    return logits[0, -steps - 1 :].float()  # type: ignore[no-any-return]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


SAMPLED = (
    Sampling(temperature=0),
    Sampling(top_p=0.9, seed=1, top_logprobs=3),
    Sampling(top_k=200, top_p=0.5, seed=2),
)


@either_way
def test_a_step_does_not_wait_for_the_device(checkpoint: Path, record: bool) -> None:
    model = load_model(checkpoint, torch.bfloat16, CUDA)
    prompts = [random_tokens(seed, length) for seed, length in enumerate((300, 20, 70))]
    with session(model, prompts, 512, record) as ours:
        ours.prefill()

        def step() -> LaunchedStep:
            launched = ours.launch(range(3), SAMPLED)
            ours.sample(launched)
            return launched

        ours.runner.collect(step())  # what is loaded or allocated at a first use
        with waiting_is_an_error():
            launched = step()
        assert all(len(computed.token_ids) == 1 for computed in ours.runner.collect(launched))


@either_way
def test_a_step_launched_before_the_last_was_read_follows_it(checkpoint: Path, record: bool) -> None:
    """Its input tokens are on the device and nowhere else."""
    model = load_model(checkpoint, torch.float32, CUDA)
    prompts = [random_tokens(seed, 100 + 30 * seed) for seed in range(4)]
    with session(model, prompts, 512, record) as ours:
        tokens = [ours.prefill().argmax(-1).tolist()]
        for _ in range(20):
            tokens.append(ours.decode(range(4), tokens[-1]).argmax(-1).tolist())
    with session(model, prompts, 512, record) as ours:
        first = ours.prefill().argmax(-1).tolist()
        for number, token in enumerate(first):
            ours.runner.admit(ours.request_ids[number], [token], [], GREEDY)
        made, before = [first], None
        for _ in range(20):
            launched = ours.launch(range(4))
            if before is not None:
                made.append(read(ours, before))
            ours.sample(launched)
            before = launched
        assert before is not None
        made.append(read(ours, before))
    assert made == tokens


def read(ours: TieredSession, step: LaunchedStep) -> list[int]:
    return [token_id for computed in ours.runner.collect(step) for token_id in computed.token_ids]


def test_a_row_is_reused_behind_a_step_with_its_last_request(checkpoint: Path) -> None:
    model = load_model(checkpoint, torch.float32, CUDA)
    prompts = [random_tokens(seed, 100 + 30 * seed) for seed in range(2)]
    with session(model, prompts, 512, record=True) as ours:
        expected = ours.prefill().argmax(-1).tolist()
    with session(model, prompts, 512, record=True, verify=False) as ours:
        ours.prefill()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        step = ours.launch([0, 1])
        ours.coordinator.release_host(ours.coordinator.retract_request("r0"))
        ours._prefill("r0", prompts[0][:-1].to(CUDA))
        ours.coordinator.step_over(step.batch.places)
        assert int(ours.decode([0], [int(prompts[0][-1])])[0].argmax()) == expected[0]


@either_way
def test_an_item_that_differs_from_its_host_copy_is_found(checkpoint: Path, record: bool) -> None:
    model = load_model(checkpoint, torch.float32, CUDA)
    prompts = [random_tokens(seed, 100 + seed) for seed in range(3)]
    opened = TieredSession(model, prompts, 512, record, verify=True)
    tokens = opened.prefill().argmax(-1).tolist()
    tokens = opened.decode([0, 1, 2], tokens).argmax(-1).tolist()
    opened.coordinator.host.kv[3] += 1
    with pytest.raises(SwapInMismatchError, match="layer 3, row 0: position"):
        opened.decode([0, 1, 2], tokens)
    opened.coordinator.close()


def test_padding_changes_nothing_in_the_tiers(checkpoint: Path) -> None:
    model = load_model(checkpoint, torch.float32, CUDA)
    prompts = [random_tokens(seed, 140 + seed) for seed in range(5)]
    with session(model, prompts, 512, record=True) as ours:
        tokens = ours.prefill().argmax(-1).tolist()
        pools = (ours.coordinator.host.kv, ours.coordinator.host.index_keys)
        torch.cuda.synchronize()
        before = [pool.clone() for pool in pools]
        ours.decode([0, 2, 4], [tokens[0], tokens[2], tokens[4]])
        torch.cuda.synchronize()
        for pool, was in zip(pools, before, strict=True):
            assert int((pool != was).any(-1).sum()) == 3 * len(pool), "three new tokens in each layer, and no more"
