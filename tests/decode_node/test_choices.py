"""Requests of one group: several answers to one prompt, which is prefilled once."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from control.messages import FurtherChoice, Generate, PrefillDone, PrefillFailed, PrefillRequest, Sampling
from control.prompt_logprobs import PromptLogprobs
from decode_node.request import RequestState
from tests.decode_node.world import GATEWAY, PREFILL, Caching, World, prompt

NAMES = "abcd"


def sampling(name: str) -> Sampling:
    return Sampling(temperature=8, seed=ord(name))


def ask(h: World, tokens: tuple[int, ...], answer: int = 40) -> None:
    for name in NAMES:
        h.ask(name, prompt=tokens, tokens=answer, group="g", sampling=sampling(name))


@cache
def alone(tokens: tuple[int, ...], answer: int = 40) -> dict[str, list[int]]:
    """The answers of requests that have the node for themselves."""
    answers = {}
    for name in NAMES:
        h = World()
        h.ask(name, prompt=tokens, tokens=answer, sampling=sampling(name))
        h.run()
        answers |= h.answers
    assert len(set(map(tuple, answers.values()))) == len(NAMES), "the seeds tell them apart"
    return answers


def prefills(h: World) -> list[PrefillRequest]:
    return [message for _, message in h.control.repeated.values() if isinstance(message, PrefillRequest)]


@pytest.mark.parametrize("harness", [World, Caching])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 200])
def test_a_prompt_is_prefilled_once_and_shared_but_for_its_last_token(length: int, harness: type[World]) -> None:
    h, tokens = harness(), prompt(length)
    ask(h, tokens)
    h.turn()
    assert [len(message.token_ids) for message in prefills(h)] == [length - 1][: length - 1]
    h.turn()
    assert {h.state(name) for name in NAMES} == {RequestState.RUNNING}
    assert h.coordinator.host.used < length + len(NAMES) * 65, "they grow by themselves"
    h.run()
    assert h.answers == alone(tokens)


def test_a_choice_that_comes_late_takes_the_prompt_of_one_that_runs() -> None:
    h, tokens = Caching(), prompt(100)
    ask(h, tokens)
    for _ in range(10):
        h.turn()
    h.ask("late", prompt=tokens, tokens=40, group="g", sampling=sampling("a"))
    h.turn()
    assert not prefills(h)
    h.run()
    assert h.answers["late"] == h.answers["a"]
    assert {name: h.answers[name] for name in NAMES} == alone(tokens)


@pytest.mark.parametrize("length", [65, 100, 200])
def test_other_prompts_and_salts_of_a_group_share_nothing(length: int) -> None:
    h, tokens = Caching(), {"a": prompt(100), "b": prompt(length, seed=1), "c": prompt(100)}
    for name, each in tokens.items():
        salt = "own" if name == "c" else ""
        h.ask(name, prompt=each, tokens=40, group="g", sampling=sampling(name), cache_salt=salt)
    h.turn()
    assert [len(message.token_ids) for message in prefills(h)] == [99, length - 1, 99]
    h.run()
    assert h.answers == {name: alone(each)[name] for name, each in tokens.items()}


class Ids(tuple[int, ...]):
    """Token ids that count how often they are read."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def test_settings_are_checked_once_for_all_choices_of_a_message() -> None:
    h, allowed = World(), Ids([5, 6])
    settings = Sampling(temperature=0).model_copy(update={"allowed_token_ids": allowed})
    further = tuple(FurtherChoice(request_id=name, seed=1) for name in NAMES)
    message = Generate(request_id="r", prompt_ids=prompt(9), max_new_tokens=3, further=further)
    for one in message.model_copy(update={"sampling": settings}).each():
        assert h.scheduler.add(one, GATEWAY) is None
    assert allowed.times == 1


def test_the_next_choice_is_prefilled_if_the_first_loses_its_attempt() -> None:
    h, tokens = Caching(slow={"a"}), prompt(100)
    ask(h, tokens)
    h.turn()
    [first] = prefills(h)
    h.remote.take(PREFILL, PrefillFailed(attempt=first.attempt, reason="out of memory"))
    h.scheduler.cancel("a", GATEWAY)
    h.turn()
    assert [message.attempt.request_id for message in prefills(h)] == ["b"]
    h.run()
    assert {name: h.answers[name] for name in "bcd"} == {name: alone(tokens)[name] for name in "bcd"}
    assert h.ended["a"] == "abort"


@pytest.mark.parametrize("harness", [World, Caching])
def test_choices_give_way_and_come_back_with_the_same_answers(harness: type[World]) -> None:
    tokens = prompt(100)
    h = harness(host_slots=100 + 3 * 64)
    ask(h, tokens, answer=120)
    h.run()
    assert h.answers == alone(tokens, 120)
    assert h.metrics.retractions.labels("host")._value.get() > 0


def test_what_lingers_is_shared_and_not_cached() -> None:
    h, tokens = Caching(lingering=True), prompt(100)
    ask(h, tokens)
    for _ in range(5):
        h.turn()
    assert h.cache.blocks.blocks == 0
    assert {h.state(name) for name in NAMES} == {RequestState.RUNNING}
    assert h.coordinator.host.used < 100 + len(NAMES) * 65


def test_a_choice_with_log_probabilities_is_prefilled_alone_and_shared() -> None:
    h, tokens = Caching(slow={"a"}), prompt(100)
    h.ask("a", prompt=tokens, tokens=40, group="g", sampling=sampling("a"), prompt_logprobs=0)
    for name in "bc":
        h.ask(name, prompt=tokens, tokens=40, group="g", sampling=sampling(name))
    h.turn()
    [first] = prefills(h)
    assert (first.attempt.request_id, first.prompt_logprobs) == ("a", 0)
    logprobs = PromptLogprobs.of(1, np.ones((99, 1), np.int32), np.zeros((99, 1), np.float32))
    h.control.answered(next(key for key, (_, message) in h.control.repeated.items() if message is first))
    h.write(first)
    h.remote.take(PREFILL, PrefillDone(attempt=first.attempt, num_tokens=99, prompt_logprobs=(logprobs,)))
    h.turn()
    assert not prefills(h)
    h.turn()
    h.ask("d", prompt=tokens, tokens=40, group="g", sampling=sampling("d"), prompt_logprobs=0)
    h.slow.add("d")
    h.turn()
    [late] = prefills(h)
    assert (late.attempt.request_id, late.prompt_logprobs, late.start) == ("d", 0, 0)
    h.scheduler.cancel("d", GATEWAY)
    h.run()
    assert {name: h.answers[name] for name in "abc"} == {name: alone(tokens)[name] for name in "abc"}
