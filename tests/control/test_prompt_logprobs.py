"""Log probabilities of a prompt travel in pieces, and each position comes once."""

import numpy as np
import pytest
from pydantic import ValidationError

from control.codec import encode
from control.messages import Output, Outputs, Peer
from control.prompt_logprobs import MAX_PROMPT_LOGPROBS, PromptLogprobs, PromptLogprobTable, too_many

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")


def piece(start: int, rows: int, alternatives: int = 2) -> PromptLogprobs:
    ints = np.arange(rows * (1 + alternatives), dtype=np.int32).reshape(rows, -1) + start
    return PromptLogprobs.of(start, ints, -ints / np.float32(7))


def test_pieces_make_a_table_and_a_table_makes_pieces() -> None:
    rows = MAX_PROMPT_LOGPROBS // 3
    table = PromptLogprobTable(rows + 1, 2)
    table.add(piece(1, 2))
    assert not table.complete
    table.add(piece(3, rows - 2))
    table.add(piece(1, 2))
    assert table.complete
    again = PromptLogprobTable(rows + 1, 2)
    pieces = list(table.pieces())
    assert all(
        len(encode(Outputs.of([Output(request_id="r", start=0, prompt_logprobs=p)]), DECODE)) < 2**19 for p in pieces
    )
    for each in pieces:
        again.add(each)
    assert again.complete
    assert (again.ints == table.ints).all()
    assert (again.floats == table.floats).all()


def test_a_prompt_of_one_token_has_none() -> None:
    table = PromptLogprobTable(1, 5)
    assert table.complete
    assert list(table.pieces()) == []


def test_what_does_not_fit_is_named() -> None:
    table = PromptLogprobTable(5, 2)
    assert table.rejection_reason(piece(3, 2)) is None
    assert "3 alternatives, not 2" in str(table.rejection_reason(piece(1, 2, alternatives=3)))
    assert "up to position 5, of a prompt of 5" in str(table.rejection_reason(piece(4, 2)))
    nan = PromptLogprobs.of(1, np.zeros((1, 3), np.int32), np.full((1, 3), np.nan, np.float32))
    assert "finite" in str(table.rejection_reason(nan))
    with pytest.raises(ValidationError, match="whole rows"):
        PromptLogprobs(start=1, alternatives=1, ints=b"1234", floats=b"1234")
    assert too_many(1000, 0) is None
    assert f"limit of {MAX_PROMPT_LOGPROBS}" in str(too_many(MAX_PROMPT_LOGPROBS, 1))
