"""How many drafts a step verifies, which it accepts, and where its requests are afterwards."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.draft_policy import DraftPolicy, MeasuredDrafts, StepSize, policy_of
from engine.passes import StepPasses


def run(policy: DraftPolicy, batch: int, seconds: dict[int, float], acceptance: float, steps: int = 6000) -> list[int]:
    """The widths of steps that take so long by width, and whose drafts are right with that probability."""
    rng, chosen = random.Random(0), []
    for _ in range(steps):
        width = policy.choose(batch)
        chosen.append(width)
        policy.note_time(StepSize(batch, width), seconds[width] * rng.uniform(0.97, 1.03))
        for _ in range(batch):
            accepted = 0
            while accepted < width - 1 and rng.random() < acceptance:
                accepted += 1
            policy.note_drafts(width - 1, accepted)
    return chosen


@pytest.mark.parametrize(
    ("seconds", "acceptance", "best"),
    [
        ({1: 1.0, 2: 1.05, 4: 1.2}, 0.85, 4),
        ({1: 1.0, 2: 1.2, 4: 2.4}, 0.85, 2),
        ({1: 1.0, 2: 1.2, 4: 1.6}, 0.05, 1),
        ({1: 1.0, 2: 1.9, 4: 3.5}, 0.6, 1),
    ],
)
def test_the_width_with_the_most_tokens_per_second_is_used(
    seconds: dict[int, float], acceptance: float, best: int
) -> None:
    chosen = run(MeasuredDrafts(), 4, seconds, acceptance)
    assert chosen[100:].count(best) > 0.95 * len(chosen[100:])


@pytest.mark.parametrize("batch", [1, 12, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.2, 1.5), (1.0, 1.6, 2.5)])
def test_it_costs_at_most_three_percent_against_no_drafts(
    batch: int, acceptance: float, costs: tuple[float, ...]
) -> None:
    seconds = dict(zip((1, 2, 4), costs, strict=True))
    policy = MeasuredDrafts()
    run(policy, batch, seconds, acceptance, steps=200)
    chosen = run(policy, batch, seconds, acceptance, steps=3000)
    tokens = {width: sum(acceptance**place for place in range(width)) for width in seconds}
    assert sum(tokens[width] for width in chosen) / sum(seconds[width] for width in chosen) > 0.97 / seconds[1]


def test_a_change_of_acceptance_is_followed() -> None:
    policy, seconds = MeasuredDrafts(), {1: 1.0, 2: 1.2, 4: 1.5}
    assert run(policy, 4, seconds, 0.0)[-100:].count(1) > 90
    assert run(policy, 4, seconds, 0.9)[-100:].count(4) > 90


def test_few_widths_are_recorded() -> None:
    assert MeasuredDrafts().widths(64) == (1, 2, 4)
    assert policy_of("2", 2).widths(64) == (3,)
    assert policy_of("auto", 0).widths(64) == (1,)


def test_the_ranks_of_a_group_take_the_size_with_the_most_requests() -> None:
    sizes = [StepSize(0, 4), StepSize(3, 4), StepSize(5, 2), StepSize(5, 1)]
    assert max(size.packed for size in sizes) == StepSize(5, 2).packed
    assert [StepSize.unpack(size.packed) for size in sizes[1:]] == sizes[1:]
    assert StepSize.unpack(sizes[0].packed).batch == 0


ROWS = 4


def passes(width: int) -> StepPasses:
    model = SimpleNamespace(device=torch.device("cpu"), spec=SimpleNamespace(vocab_size=8))
    return StepPasses(model, None, ROWS, max_drafts=width - 1)  # type: ignore[arg-type]


@given(
    drafts=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    drawn=st.lists(st.integers(-2, 3), min_size=4, max_size=4),
    valid=st.integers(0, 4),
)
def test_tokens_are_taken_up_to_the_first_that_is_no_draft(drafts: list[int], drawn: list[int], valid: int) -> None:
    made = passes(4)
    made.inputs[0, 0] = row = 2
    made.tokens[row] = torch.tensor([7, *drafts])
    made.positions[row] = 10
    made.valid[0] = valid
    made.accept(1, 4, torch.tensor(drawn))
    expected = 0
    while expected < valid:
        expected += 1
        if expected == 4 or drawn[expected - 1] != drafts[expected - 1]:
            break
    assert made.counts.tolist() == [expected, 0, 0, 0]
    assert made.positions.tolist() == [0, 0, 10 + expected, 0, 0]
    assert int(made.tokens[row, 0]) == (max(0, drawn[expected - 1]) if expected else 7)


@pytest.mark.parametrize("width", [1, 3])
def test_requests_of_a_batch_come_on_independently(width: int) -> None:
    made = passes(width)
    made.inputs[0, :2] = torch.tensor([3, 1])
    made.tokens[3, 1:] = 5
    made.valid[:2] = width
    drawn = torch.tensor([[5] * width, [6] * width])
    made.accept(2, width, drawn.flatten())
    assert made.counts.tolist() == [width, 1, 0, 0]
    assert made.positions.tolist() == [0, 1, 0, width, 0]
    assert made.tokens[:, 0].tolist() == [0, 6, 0, 5, 0]
