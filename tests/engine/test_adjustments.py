"""Penalties, biases and bans, against a plain computation for one request and token at a time."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from control.messages import Sampling
from engine.adjustments import Ban, LogitAdjustments, adjusts, banned_tokens

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
    """Requests come, get tokens, and leave their rows to others."""
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
        logits = 3 * torch.randn(len(places), VOCAB, generator=torch.Generator().manual_seed(rng.randrange(99)))
        bans = [
            Ban(entry, token)
            for entry, (sampling, _, generated) in enumerate(batch)
            for token in banned_tokens(sampling, STOPS, generated)
        ]
        before = logits.clone()
        changed = adjustments.apply(logits, torch.tensor(places), bans)
        assert torch.equal(logits, before)
        for entry, (sampling, prompt, generated) in enumerate(batch):
            expected = torch.tensor(changed_alone(logits[entry].tolist(), sampling, prompt, generated))
            torch.testing.assert_close(changed[entry], expected, rtol=1e-6, atol=1e-6)
            if not adjusts(sampling):
                assert torch.equal(changed[entry], logits[entry])
        drawn = [rng.choice([-1, *range(12)]) for _ in places]
        adjustments.count(torch.tensor(places), torch.tensor(drawn))
        for token, (_, _, generated) in zip(drawn, batch, strict=True):
            if token >= 0:
                generated.append(token)


def test_a_request_that_comes_back_has_the_counts_that_it_had() -> None:
    sampling = Sampling(frequency_penalty=0.5, repetition_penalty=1.2)
    logits = torch.randn(1, VOCAB)
    stayed, back = (LogitAdjustments(2, VOCAB, CPU) for _ in range(2))
    stayed.admit(0, sampling, [1, 2], [])
    for token in (5, 5, 2):
        stayed.count(torch.tensor([0]), torch.tensor([token]))
    back.admit(1, sampling, [1, 2], [5, 5, 2])
    assert torch.equal(stayed.apply(logits, torch.tensor([0]), []), back.apply(logits, torch.tensor([1]), []))


def test_tokens_of_a_batch_that_needs_nothing_cost_nothing() -> None:
    adjustments = LogitAdjustments(2, 1 << 40, CPU)
    adjustments.admit(0, Sampling(top_p=0.5, min_p=0.1), [1], [])
    assert not adjusts(Sampling(temperature=0.3, top_k=4, min_p=0.2, top_logprobs=3))
