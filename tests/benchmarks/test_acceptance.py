"""Acceptance of drafts: how right ones are counted, how tokens are drawn, and the drafts of the trained model."""

import pytest
import torch

from benchmarks.acceptance import WAYS, Continuation, acceptance, continuations, draw, main, tokens_a_step
from benchmarks.passkey import BEGIN_ID, CHECKPOINT
from benchmarks.passkey.question import BEGIN, make_question
from engine.sampling import RandomStream
from model.loader import load_model

WRONG = 99
TOKENS = [10, 11, 12, 13, 14, 15]


def continuation(right: list[int]) -> Continuation:
    """With so many right drafts after each token."""
    drafts = [[*TOKENS[place : place + count], WRONG, WRONG, WRONG][:3] for place, count in enumerate(right, 1)]
    return Continuation(TOKENS, drafts)


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    drafts = [[11, WRONG, 13], [12, 13, 14], [WRONG, 14, 15], [14, 15, 16], [15, 16, 17], [16, 17, 18]]
    assert Continuation(TOKENS, drafts).right() == [1, 3, 0, 2, 1, 0]


def test_acceptance_is_of_drafts_whose_tokens_are_known() -> None:
    found = [continuation([1, 3, 0, 2, 1, 0])]
    assert [acceptance(found, number) for number in (1, 2, 3)] == [4 / 5, 2 / 3, 1]


@pytest.mark.parametrize(("num_drafts", "steps"), [(1, 3), (2, 2), (3, 2)])
def test_a_step_gives_its_right_drafts_and_one_token_more(num_drafts: int, steps: int) -> None:
    found = [continuation([1, 0, 3, 2, 1, 0])]
    assert tokens_a_step(found * 2, num_drafts) == 5 / steps


def test_each_way_draws_from_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    keys = torch.from_numpy(RandomStream(1).keys(0, 4000))
    drawn = torch.stack([draw(logits.repeat(len(WAYS), 1), key.repeat(len(WAYS))) for key in keys], dim=1)
    for (temperature, _), tokens in zip(WAYS, drawn, strict=True):
        expected = (logits / temperature).softmax(-1) if temperature else torch.tensor([0.0, 0.0, 0.0, 1.0])
        torch.testing.assert_close(tokens.bincount(minlength=4) / len(keys), expected, rtol=0, atol=0.03)


def test_the_trained_model_answers_and_drafts_its_answer() -> None:
    question = make_question("0", 300)
    model = load_model(CHECKPOINT, torch.float32, torch.device("cpu"), drafts=True)
    likeliest, *_ = continuations(model, [BEGIN_ID, *question.prompt.removeprefix(BEGIN).encode()], 5, seed=0)
    assert bytes(likeliest.tokens).decode() == question.key
    assert acceptance([likeliest], 1) >= 0.75


def test_each_text_is_drawn_in_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    main(length=300, count=1, tokens=5)
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert rows == [[text, f"{way[0]:g}"] for text in ("prose", "Python", "answers") for way in WAYS]
