"""Requests that go on after tokens of another node: as if it had generated all of them."""

from functools import cache
from typing import Any

import pytest

from control.grammar import Grammar, Regex
from control.messages import Output, PrefillRequest, Sampling
from tests.decode_node.test_grammars import bytes_vocabulary
from tests.decode_node.world import GATEWAY, World

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"tokens": 20},
    "sampled": {"tokens": 20, "sampling": Sampling(temperature=2.0, seed=3, top_logprobs=2)},
    "penalties": {
        "tokens": 20,
        "sampling": Sampling(seed=5, allowed_token_ids=(7, 8, 9), frequency_penalty=1.5, presence_penalty=0.5),
    },
    "bad words": {"tokens": 20, "sampling": Sampling(temperature=0, allowed_token_ids=(7, 8), bad_words=((7, 7),))},
    "min_tokens": {
        "tokens": 20,
        "stop_token_ids": (8,),
        "sampling": Sampling(temperature=0, allowed_token_ids=(7, 8), logit_bias=((8, 50.0),), min_tokens=9),
    },
    "grammar": {
        "tokens": 40,
        "sampling": Sampling(seed=9),
        "grammar": Grammar(structure=Regex(pattern="(ab|cd){7}x")),
    },
}


def world(**options: Any) -> World:
    return World(vocabulary=bytes_vocabulary, **options)


def answers(h: World, resumed_at: dict[str, list[int]]) -> dict[str, list[int]]:
    for name, fields in REQUESTS.items():
        h.answers[name] = list(resumed_at[name])
        h.ask(name, prompt=(1, 5, 200), generated=tuple(resumed_at[name]), **fields)
    h.run()
    assert set(h.ended.values()) <= {"stop", "length"}, h.errors
    h.grammars.close()
    return h.answers


@cache
def whole_answers() -> dict[str, list[int]]:
    return answers(world(), {name: [] for name in REQUESTS})


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("options", [{}, {"max_drafts": 2}, {"device_slots": 20}, {"host_slots": 90}])
def test_a_resumed_request_says_what_it_would_have_said(count: int, options: dict[str, Any]) -> None:
    whole = whole_answers()
    assert len(whole["min_tokens"]) == 10
    assert answers(world(**options), {name: ids[:count] for name, ids in whole.items()}) == whole


def test_tokens_that_do_not_fit_the_grammar_end_a_request() -> None:
    h = world()
    h.answers["r"] = [7]
    h.ask("r", generated=(7,), grammar=Grammar(structure=Regex(pattern="ab")))
    h.run()
    h.grammars.close()
    assert h.ended == {"r": "error"}
    assert "its 1 tokens from another node do not fit its grammar" in str(h.errors["r"])


def test_the_log_probabilities_of_its_prompt_came_from_the_other_node() -> None:
    h = World()
    h.answers["r"] = [4, 5]
    h.ask("r", generated=(4, 5), prompt_logprobs=2)
    h.scheduler.turn()
    [asked] = [message for _, message in h.control.repeated.values() if isinstance(message, PrefillRequest)]
    assert asked.prompt_logprobs is None
    h.run()
    assert h.ended == {"r": "length"}, h.errors


def test_its_first_step_here_counts_among_the_stages() -> None:
    h = World()
    for name, generated in (("new", ()), ("resumed", (4, 5))):
        h.answers[name] = list(generated)
        h.ask(name, generated=generated)
    h.run()
    labels = {"stage": "first_step", "prompt": "to 1K"}
    assert h.metrics.registry.get_sample_value("hisparse_pd_stage_seconds_count", labels) == 2


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    assert "token id 512 is outside the vocabulary" in str(World().ask("r", generated=(512,)))


def test_new_tokens_are_sent_again_by_their_index() -> None:
    h = World()
    h.ask("r", prompt=(1,), tokens=9, generated=(2, 3, 4))
    h.answers["r"] = [2, 3, 4]
    h.run()
    h.ask("s", prompt=(1,), tokens=9, generated=(2, 3, 4))
    h.answers["s"] = [2, 3, 4]
    while len(h.answers["s"]) < 6:
        h.turn()
    h.scheduler.outputs.resend("s", 4, GATEWAY)
    [output, *_] = [one for one in h.control.outputs() if isinstance(one, Output) and one.request_id == "s"]
    assert (output.start, [token.token_id for token in output.tokens][:2]) == (4, [6, 7])


def test_a_resumed_request_that_has_streamed_nothing_is_handed_over() -> None:
    h = World(slow={"waits"})
    for name in ("waits", "streams"):
        h.ask(name, tokens=30, generated=(4, 5))
        h.answers[name] = [4, 5]
    while len(h.answers["streams"]) < 4:
        h.turn()
    h.scheduler.hand_over()
    h.run()
    assert h.ended == {"waits": "abort", "streams": "length"}
