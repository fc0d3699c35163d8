"""A request's state: ends, stop tokens, violations, and how it is rebuilt; and the masks of a batch."""

import numpy as np
import pytest

from control.grammar import JSON_OBJECT, JsonSchema, Lark, Regex, TextChoice
from engine.grammar import GrammarViolation
from engine.grammar.masks import MaskWriter
from tests.engine.grammar.small import EOS, SIZE, TOOL_CALL, allowed, compiled, encode, id_of, vocabulary


def test_a_state_rebuilt_from_its_tokens_allows_the_same() -> None:
    grammar, rng = compiled(JSON_OBJECT, after="</think>"), np.random.default_rng(3)
    state = grammar.start()
    tokens = encode("well</think>")
    for token_id in tokens:
        state.advance(token_id)
    for _ in range(40):
        assert allowed(grammar.start(generated=tokens)) == allowed(state)
        may = sorted(allowed(state) - {id_of(EOS)})
        if not may:
            break
        tokens.append(int(rng.choice(may)))
        state.advance(tokens[-1])


def test_states_of_one_grammar_are_independent() -> None:
    grammar = compiled(TextChoice(options=("ab", "ac")))
    state, other = grammar.start(generated=encode("a")), grammar.start(generated=encode("a"))
    state.advance(encode("b")[0])
    assert state.done
    assert not other.done
    assert encode("c")[0] in allowed(other)


def test_only_stop_tokens_follow_a_whole_answer() -> None:
    state = compiled(TextChoice(options=("a",))).start()
    assert not state.done
    assert id_of(EOS) not in allowed(state)
    state.advance(encode("a")[0])
    assert state.done
    assert allowed(state) == {id_of(EOS)}
    state.advance(id_of(EOS))
    assert state.done


def test_a_requests_own_stop_tokens_end_it() -> None:
    stop = id_of(TOOL_CALL)
    grammar = compiled(Regex(pattern="a*"))
    assert allowed(grammar.start([stop])) & {stop, id_of(EOS)} == {stop}
    assert allowed(grammar.start([stop, id_of(EOS)])) >= {stop, id_of(EOS)}
    assert id_of(EOS) in allowed(grammar.start())
    grammar.start([stop]).advance(stop)
    with pytest.raises(GrammarViolation, match="it is no stop token"):
        grammar.start([stop]).advance(id_of(EOS))


def test_a_token_that_is_not_allowed_is_a_violation() -> None:
    grammar = compiled(JsonSchema(schema_text='{"type": "boolean"}'))
    for token_id in (encode("x")[0], id_of(EOS), SIZE + 3):
        with pytest.raises(GrammarViolation, match=f"token {token_id} is not allowed"):
            grammar.start().advance(token_id)


@pytest.mark.parametrize("grammar", ["start: <[*]>", "start: <[0-847]>", 'start: "a" | <[840]>'])
def test_ids_without_a_token_are_never_allowed(grammar: str) -> None:
    assert max(allowed(compiled(Lark(grammar=grammar)).start())) < SIZE


def test_a_grammar_that_becomes_too_complex_ends_only_its_request() -> None:
    """The automaton of this expression, which is built as the text comes, has no bound that could be reached."""
    hostile, other = compiled(Regex(pattern="(.*a.{30}b.*){20}")).start(), compiled(JSON_OBJECT).start()
    letters, rng = [encode("a")[0], encode("b")[0]], np.random.default_rng(0)
    row = np.zeros(vocabulary().words, dtype=np.int32)

    def go_on() -> None:
        for _ in range(2000):
            hostile.fill(row)
            hostile.advance(int(rng.choice(letters)))

    with pytest.raises(GrammarViolation, match=r"too many|too complex"):
        go_on()
    assert encode("{")[0] in allowed(other)


def test_drafts_that_make_a_grammar_too_complex_end_only_its_request() -> None:
    hostile, other = compiled(Regex(pattern="(.*a.{30}b.*){20}")).start(), compiled(JSON_OBJECT).start()
    writer, rng = MaskWriter(8, vocabulary().words, pinned=False), np.random.default_rng(0)
    letters = [encode("a")[0], encode("b")[0]]
    for _ in range(700):
        drafts = [int(rng.choice(letters)) for _ in range(3)]
        if failed := writer.write([other, hostile], [(), drafts], width=4).failed:
            break
        for token_id in drafts:
            hostile.advance(token_id)
    assert list(failed) == [1]
    assert "cannot be taken back: lexer error: too many" in failed[1]
    assert encode("{")[0] in allowed(other)


@pytest.mark.parametrize("threads", [1, 2])
def test_requests_without_drafts_take_part_in_a_step_with_drafts(threads: int) -> None:
    words = vocabulary().words
    state, expected = compiled(JSON_OBJECT).start(), np.full((4, words), -1, dtype=np.int32)
    state.fill(expected[0])
    masks = MaskWriter(4, words, pinned=False, threads=threads).write([state, None], [(), ()], width=2)
    assert masks.words is not None
    assert masks.failed == {}
    assert np.array_equal(masks.words.numpy(), expected)


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
    with pytest.raises(ValueError, match="room for 6 masks, found 2 requests x 4"):
        writer.write([one, two], width=4)


def test_a_draft_of_a_stop_token_is_followed_where_it_ends_nothing() -> None:
    grammar, words = compiled(TextChoice(options=("a", "abc"))), vocabulary().words
    writer, eos = MaskWriter(3, words, pinned=False), id_of(EOS)
    for stops, follows in ((), True), ((eos,), False):
        state = grammar.start(stops, encode("a"))
        masks = writer.write([state], [(eos, encode("b")[0])], width=3).words
        assert masks is not None
        expected = np.full((3, words), -1, dtype=np.int32)
        state.fill(expected[0])
        if follows:
            expected[1] = expected[0]
            grammar.start((), encode("ab")).fill(expected[2])
        assert np.array_equal(masks.numpy(), expected)
        assert allowed(state) == {eos, encode("b")[0]}


def test_a_request_that_cannot_go_on_is_named_and_does_no_harm() -> None:
    stuck = compiled(Lark(grammar='start: "a" <[840]>')).start()
    stuck.advance(encode("a")[0])
    writer = MaskWriter(4, vocabulary().words, pinned=False)
    masks = writer.write([compiled(JSON_OBJECT).start(), stuck])
    assert masks.words is not None
    assert masks.words[1].tolist() == [-1] * vocabulary().words
    assert list(masks.failed) == [1]
    assert "cannot be continued" in masks.failed[1]
