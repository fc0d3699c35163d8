"""Outputs travel as columns: what goes in comes out, and columns that contradict each other are refused as a whole."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from control.codec import MalformedMessage, decode, encode
from control.messages import Output, Outputs, Peer, Token
from control.prompt_logprobs import MAX_PROMPT_LOGPROBS, PromptLogprobs, PromptLogprobTable, too_many

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")

ids = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
plain = st.lists(ids.map(Token), max_size=4)
with_logprobs = st.lists(
    st.builds(Token, ids, st.none() | floats, st.lists(st.tuples(ids, floats), max_size=3).map(tuple)), max_size=4
)
rows = st.builds(
    Output,
    request_id=st.sampled_from(["a", "b", "c" * 128]),
    start=ids,
    tokens=(plain | with_logprobs).map(tuple),
    finish_reason=st.none() | st.sampled_from(["stop", "error"]),
    error=st.none() | st.text(max_size=5),
    cached_tokens=st.integers(0, 3),
    drafts=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    prompt_logprobs=st.none() | st.just(PromptLogprobs(start=1, alternatives=0, ints=b"1234", floats=b"1234")),
)


def as_sent(outputs: list[Output]) -> dict[str, Any]:
    """The whole frame."""
    frame: dict[str, Any] = msgpack.unpackb(encode(Outputs.of(outputs), DECODE))
    return frame


@given(st.lists(rows, max_size=6))
def test_outputs_survive_the_wire(outputs: list[Output]) -> None:
    _, message = decode(encode(Outputs.of(outputs), DECODE))
    assert isinstance(message, Outputs)
    assert list(message.rows()) == outputs


def test_the_bytes_are_those_of_the_protocol_page() -> None:
    a = Output(request_id="a", start=3, tokens=(Token(17),))
    b = Output(request_id="b", start=0, tokens=(Token(5), Token(6)), cached_tokens=64)
    assert as_sent([a, b])["body"] == {
        "request_ids": ["a", "b"],
        "starts": bytes.fromhex("03000000 00000000"),
        "counts": bytes.fromhex("01000000 02000000"),
        "token_ids": bytes.fromhex("11000000 05000000 06000000"),
        "details": [{"row": 1, "cached_tokens": 64}],
    }


NEGATIVE = bytes.fromhex("ffffffff")
MINIMUM = bytes.fromhex("00000080")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_ids": ["a"]}, "differ in length"),
        ({"request_ids": ["a", ""]}, "at least 1 character"),
        ({"request_ids": ["a", 1]}, "valid string"),
        ({"starts": bytes(4)}, "differ in length"),
        ({"starts": bytes(7)}, "multiple"),
        ({"starts": [3, 0]}, "valid bytes"),
        ({"starts": bytes(4) + NEGATIVE}, "negative"),
        ({"counts": bytes(8)}, "3 tokens, where the counts have 0"),
        ({"counts": bytes.fromhex("04000000") + NEGATIVE}, "negative"),
        ({"counts": bytes.fromhex("ffffff7fffffff7f")}, "3 tokens, where the counts have 4294967294"),
        ({"token_ids": bytes(16)}, "4 tokens, where the counts have 3"),
        ({"token_ids": bytes(8) + MINIMUM}, "negative"),
        ({"details": [{"row": 2}]}, "row 2 after row -1, of 2 rows"),
        ({"details": [{"row": 1}, {"row": 1}]}, "row 1 after row 1"),
        ({"details": [{"row": 1}, {"row": 0}]}, "row 0 after row 1"),
        ({"details": [{"row": -1}]}, "greater than or equal to 0"),
        ({"details": [{"row": 1, "logprobs": [{"logprob": -1.0}]}]}, "1 log probabilities of 2 tokens"),
        ({"details": [{"row": 0, "logprobs": [{"logprob": float("nan")}]}]}, "finite"),
        ({"details": [{"row": 0, "finish_reason": "bored"}]}, "finish_reason"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(changes: dict[str, Any], reason: str) -> None:
    frame = as_sent([Output("a", 3, (Token(17),)), Output("b", 0, (Token(5), Token(6)))])
    frame["body"] |= changes
    with pytest.raises(MalformedMessage, match=reason):
        decode(msgpack.packb(frame))


# --- log probabilities of a prompt, of which each position comes once ---


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
