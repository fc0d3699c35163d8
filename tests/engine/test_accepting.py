"""Which drafts a step accepts, and where its requests are afterwards."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.passes import StepPasses

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
