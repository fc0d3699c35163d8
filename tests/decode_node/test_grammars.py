"""Requests with a grammar among others: a token is a byte, and the model predicts the next byte."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from control.grammar import Grammar, JsonSchema, Regex, TextChoice
from control.messages import Sampling
from engine.draft_policy import DraftPolicy
from engine.grammar.state import GrammarState
from engine.grammar.vocabulary import Vocabulary
from tests.decode_node.world import GATEWAY, HOT, VOCAB, World, counted
from tests.gateway.world import EOS, byte_tokenizer

WORDS = Grammar(structure=TextChoice(options=("abc", "xyz")))


def bytes_vocabulary() -> Vocabulary:
    return Vocabulary(json.loads(byte_tokenizer().to_str()), VOCAB, [EOS])


@pytest.fixture
def h() -> Iterator[World]:
    harness = World(vocabulary=bytes_vocabulary)
    yield harness
    harness.grammars.close()


def text(h: World, request_id: str) -> str:
    return bytes(token for token in h.answers[request_id] if token < 256).decode()


def test_an_answer_follows_its_grammar_and_others_are_as_they_were(h: World) -> None:
    h.ask("free", prompt=(1, 5), tokens=20)
    h.ask("words", prompt=(1, 5), tokens=20, grammar=WORDS)
    h.ask("later", prompt=(1, ord("w")), tokens=20, grammar=WORDS, stop_token_ids=(EOS,))
    h.run()
    assert h.answers["free"] == counted((5,), 20)
    assert (text(h, "words"), text(h, "later")) == ("abc", "xyz")
    assert h.ended == {"free": "length", "words": "stop", "later": "stop"}


class Widening(DraftPolicy):
    """A step has more drafts than the one before, and then none again."""

    def __init__(self) -> None:
        super().__init__(3)
        self._widths = itertools.cycle((1, 2, 4))

    def choose(self, batch: int) -> int:
        return next(self._widths)


def test_all_that_run_follow_their_grammars_however_many_drafts_a_step_has() -> None:
    h = World(vocabulary=bytes_vocabulary, max_drafts=3, policy=Widening(), max_running=4)
    names = [f"words {number}" for number in range(8)]
    for name in names:
        h.ask(name, prompt=(1, 5), tokens=20, grammar=WORDS)
    h.run()
    h.grammars.close()
    assert [text(h, name) for name in names] == ["abc"] * 8
    assert set(h.ended.values()) == {"stop"}


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(h: World) -> None:
    h.ask("bad", tokens=5, grammar=Grammar(structure=JsonSchema(schema_text='{"type": "nonsense"}')))
    h.ask("good", prompt=(1, 5), tokens=5)
    h.run()
    assert h.ended == {"bad": "invalid", "good": "length"}
    assert "nonsense" in (h.errors["bad"] or "")
    assert h.answers["bad"] == []


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (Grammar(structure=TextChoice(options=("abc",))), {"bad_words": ((ord("b"), ord("c")),)}),
        (Grammar(structure=TextChoice(options=("abc",))), {"allowed_token_ids": (5,)}),
        (None, {"allowed_token_ids": (5,), "bad_words": ((5,),)}),
    ],
)
def test_constraints_that_leave_no_token_are_the_client_s_mistake(
    h: World, grammar: Grammar | None, limit: dict[str, Any]
) -> None:
    h.ask("none", grammar=grammar, sampling=Sampling(temperature=0, **limit))
    h.ask("good", prompt=(1, 5), tokens=5)
    h.run()
    assert h.ended == {"none": "invalid", "good": "length"}
    assert "leaves no token to choose" in (h.errors["none"] or "")


def test_a_grammar_that_no_token_continues_is_the_client_s_mistake(h: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "_failure", lambda state: "too complex")
    h.ask("none", grammar=WORDS)
    h.run()
    assert (h.ended, h.errors["none"]) == ({"none": "invalid"}, "too complex")


def test_without_a_tokenizer_a_grammar_is_refused() -> None:
    h = World()
    h.ask("words", grammar=WORDS)
    h.run()
    assert h.ended == {"words": "invalid"}
    assert "no tokenizer" in (h.errors["words"] or "")
    h.grammars.close()


def test_a_vocabulary_that_could_not_be_read_once_is_read_again() -> None:
    failures = [OSError("too many open files")]

    def read() -> Vocabulary:
        if failures:
            raise failures.pop()
        return bytes_vocabulary()

    h = World(vocabulary=read)
    h.ask("too early", prompt=(1, 5), tokens=20, grammar=WORDS)
    h.run()
    h.grammar_done.clear()
    h.ask("later", prompt=(1, 5), tokens=20, grammar=WORDS)
    h.run()
    h.grammars.close()
    assert h.ended == {"too early": "abort", "later": "stop"}
    assert "too many open files" in str(h.errors["too early"])


def test_who_waits_for_a_grammar_is_overtaken() -> None:
    may_go_on = threading.Event()

    def slowly() -> Vocabulary:
        assert may_go_on.wait(20)
        return bytes_vocabulary()

    h = World(vocabulary=slowly, max_running=1)
    h.ask("words", prompt=(1, 5), grammar=WORDS)
    h.ask("free", prompt=(1, 5), tokens=3)
    while "free" not in h.ended:
        h.turn()
    assert list(h.ended) == ["free"]
    may_go_on.set()
    h.run()
    assert text(h, "words") == "abc"
    h.grammars.close()


def test_a_request_that_ends_before_its_grammar_is_compiled_leaves_nothing(h: World) -> None:
    h.ask("words", grammar=WORDS)
    h.scheduler.cancel("words", GATEWAY)
    h.turn()
    h.run()
    assert h.ended == {"words": "abort"}


def test_a_retracted_request_goes_on_in_its_grammar() -> None:
    """Nine device slots: two requests with one slot each are admitted, and each grows to five."""
    h = World(device_slots=HOT + 1 + 2, vocabulary=bytes_vocabulary)
    pattern = Grammar(structure=Regex(pattern="(ab|cd){14}x"))
    for name in "pqrs":
        h.ask(name, prompt=(1, 200), tokens=40, grammar=pattern, sampling=Sampling(temperature=1.0, seed=ord(name)))
    h.run()
    assert h.metrics.retractions.labels("device")._value.get() > 0
    for name in "pqrs":
        answer = text(h, name)
        assert len(answer) == 29
        assert answer.endswith("x")
        assert all(answer[i : i + 2] in ("ab", "cd") for i in range(0, 28, 2))
