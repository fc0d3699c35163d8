"""The masks of a batch."""

import numpy as np

from control.grammar import JSON_OBJECT, Lark, TextChoice
from engine.grammar.masks import MaskWriter
from tests.engine.grammar.small import compiled, encode, vocabulary


def test_each_row_is_its_requests_mask_and_the_others_are_all_ones() -> None:
    words = vocabulary().words
    writer = MaskWriter(6, words, pinned=False, threads=2)
    one, two = compiled(JSON_OBJECT).start(), compiled(TextChoice(options=("a", "b"))).start()
    expected = np.full((3, words), -1, dtype=np.int32)
    one.fill(expected[0])
    two.fill(expected[2])
    for _ in range(2):
        masks = writer.write([one, None, two])
        assert masks.words is not None
        assert masks.failed == {}
        assert np.array_equal(masks.words.numpy(), expected)
    # The rows change hands.
    masks = writer.write([None, two])
    assert masks.words is not None
    assert np.array_equal(masks.words.numpy(), np.stack([expected[1], expected[2]]))
    assert writer.write([None, None, None, None]).words is None


def test_a_request_that_cannot_go_on_is_named_and_does_no_harm() -> None:
    stuck = compiled(Lark(grammar='start: "a" <[840]>')).start()
    stuck.advance(encode("a")[0])
    writer = MaskWriter(4, vocabulary().words, pinned=False)
    masks = writer.write([compiled(JSON_OBJECT).start(), stuck])
    assert masks.words is not None
    assert masks.words[1].tolist() == [-1] * vocabulary().words
    assert list(masks.failed) == [1]
    assert "cannot be continued" in masks.failed[1]
