"""Penalties, biases and bans, against a plain computation for one request and token at a time."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from control.messages import MAX_BAD_WORD_TOKENS, Sampling
from engine.adjustments import Ban, BannedTokens, LogitAdjustments, adjusts

VOCAB = 40
CPU = torch.device("cpu")
KINDS = [
    Sampling(),
    Sampling(frequency_penalty=0.7),
    Sampling(presence_penalty=-1.5),
    Sampling(repetition_penalty=1.3),
    Sampling(frequency_penalty=-0.3, presence_penalty=0.4, repetition_penalty=0.8),
    Sampling(logit_bias=((3, 50.0), (4, -100.0), (7, 0.5))),
    Sampling(allowed_token_ids=(1, 5, 6, 7), logit_bias=((5, 2.0), (9, 100.0)), repetition_penalty=2.0),
    Sampling(bad_words=((2,), (3, 4), (5, 6, 7)), frequency_penalty=0.1),
    Sampling(min_tokens=3),
]
STOPS = (8, 9)


def changed_alone(
    logits: list[float], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """The changed logits of one request, token by token."""
    changed = []
    bias = dict(sampling.logit_bias)
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
            value = -math.inf
        for word in sampling.bad_words:
            if [*generated, token][-len(word) :] == list(word):
                value = -math.inf
        if len(generated) < sampling.min_tokens and token in STOPS:
            value = -math.inf
        if token in prompt or token in generated:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        count = list(generated).count(token)
        changed.append(value - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0))
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_requests_of_a_batch_are_changed_as_if_alone(seed: int) -> None:
    """Each place of a step as if the drafts before it had been generated."""
    rng = random.Random(seed)
    rows = 6
    adjustments = LogitAdjustments(rows, VOCAB, CPU)
    running: dict[int, tuple[Sampling, list[int], list[int]]] = {}
    for _ in range(60):
        row = rng.randrange(rows)
        if rng.random() < 0.4:
            generated = [rng.randrange(12) for _ in range(rng.randrange(4))]
            running[row] = rng.choice(KINDS), [rng.randrange(12) for _ in range(rng.randint(1, 9))], generated
            adjustments.admit(row, *running[row])
        places = [row for row in running if rng.random() < 0.7]
        batch = [running[row] for row in places]
        if not any(adjusts(sampling) for sampling, _, _ in batch):
            continue
        width = rng.randint(1, 3)
        drafts = [[rng.randrange(12) for _ in range(width - 1)] for _ in places]
        generator = torch.Generator().manual_seed(rng.randrange(99))
        logits = 3 * torch.randn(len(places) * width, VOCAB, generator=generator)
        bans = [
            Ban(entry * width + place, BannedTokens(sampling, STOPS).after(generated, drafts[entry][:place]))
            for entry, (sampling, _, generated) in enumerate(batch)
            for place in range(width)
        ]
        before = logits.clone()
        changed = adjustments.apply(logits, torch.tensor(places), bans, torch.tensor(drafts, dtype=torch.int64))
        assert torch.equal(logits, before)
        for number, (own, found) in enumerate(zip(logits, changed, strict=True)):
            sampling, prompt, generated = batch[number // width]
            followed = [*generated, *drafts[number // width][: number % width]]
            expected = torch.tensor(changed_alone(own.tolist(), sampling, prompt, followed))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            if not adjusts(sampling):
                assert torch.equal(found, own)
        drawn = [rng.choice([-1, *range(12)]) for _ in places]
        adjustments.count(torch.tensor(places), torch.tensor(drawn))
        for token, (_, _, generated) in zip(drawn, batch, strict=True):
            if token >= 0:
                generated.append(token)


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12),
    generated=st.lists(st.integers(0, 2), max_size=8),
    min_tokens=st.integers(0, 3),
)
def test_the_index_of_bad_words_bans_what_a_search_of_them_bans(
    words: list[list[int]], generated: list[int], min_tokens: int
) -> None:
    expected = {word[-1] for word in words if len(word) > 1 and generated[-len(word) + 1 :] == word[:-1]}
    if len(generated) < min_tokens:
        expected.update(STOPS)
    banned = BannedTokens(Sampling(bad_words=tuple(map(tuple, words)), min_tokens=min_tokens), STOPS)
    assert set(banned.after(generated).tolist()) == expected


class CountedReads(list[int]):
    """Counts the tokens that are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([(first, 7, token) for first in range(35) for token in range(35)], 3),
        ([(first, 8, token) for first in range(35) for token in range(35)], 1),
        ([(7,) * length + (1,) for length in range(1, 90)], MAX_BAD_WORD_TOKENS),
    ],
    ids=["one length", "another newest token", "as many lengths as fit"],
)
def test_a_step_reads_no_more_of_an_answer_than_the_lengths_of_words(words: list[tuple[int, ...]], most: int) -> None:
    generated = CountedReads([7] * 10_000)
    BannedTokens(Sampling(bad_words=tuple(words)), ()).after(generated)
    assert generated.reads <= most


@pytest.mark.parametrize("repetition", [0.01, 100.0])
@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_within_the_bounds_finite_logits_stay_finite(repetition: float, bias: float) -> None:
    sampling = Sampling(
        repetition_penalty=repetition, frequency_penalty=-2, presence_penalty=-2, logit_bias=((0, bias), (1, bias))
    )
    adjustments = LogitAdjustments(1, VOCAB, CPU)
    adjustments.admit(0, sampling, list(range(VOCAB)), [0] * 100_000)
    logits = torch.linspace(-1e36, 1e36, VOCAB).unsqueeze(0)
    assert adjustments.apply(logits, torch.tensor([0]), []).isfinite().all()


def test_tokens_of_a_batch_that_needs_nothing_cost_nothing() -> None:
    adjustments = LogitAdjustments(2, 1 << 40, CPU)
    adjustments.admit(0, Sampling(top_p=0.5, min_p=0.1), [1], [])
    assert not adjusts(Sampling(temperature=0.3, top_k=4, min_p=0.2, top_logprobs=3))
