"""A decode node that drafts gives the tokens that it gives without drafts, whatever happens to its requests."""

import random
from collections.abc import Callable, Iterator

import pytest

from control.messages import Sampling
from decode_node.request import RequestState
from hisparse.coordinator import Tier
from tests.decode_node.world import Caching, CountingModel, World, counted, prompt

GUESSES: dict[str, Callable[[int], int]] = {
    "right": lambda token_id: token_id + 1,
    "wrong": lambda token_id: 3,
    "mixed": lambda token_id: token_id + 1 if token_id % 5 else 7,
}
DRAFTS = [1, 2, 3]


@pytest.fixture(autouse=True)
def violations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is swapped in, stored or backed up for a request that has left."""
    worlds: list[World] = []
    made = World.__post_init__

    def noting(world: World) -> None:
        made(world)
        worlds.append(world)

    monkeypatch.setattr(World, "__post_init__", noting)
    yield
    assert worlds
    assert all(world.coordinator.counters().violations == 0 for world in worlds)


def without_and_with(drafts: int, ask: Callable[[World], object], scale: float, guesses: str = "right") -> World:
    """A node that drafts. Without drafts its requests get the same answers and ends."""
    found = []
    for max_drafts in (0, drafts):
        h = World(max_drafts=max_drafts, model=CountingModel(GUESSES[guesses]))
        h.model.scale = scale
        ask(h)
        h.run()
        found.append((h.answers, h.ended))
    assert found[0] == found[1]
    return h


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("guesses", GUESSES)
def test_tokens_do_not_depend_on_drafts(guesses: str, drafts: int) -> None:
    h = World(max_drafts=drafts, model=CountingModel(GUESSES[guesses]))
    asked = {f"r{length}": (prompt(length, length), 1 + length % 37) for length in (1, 2, 3, 7, 20, 65, 90)}
    for request_id, (tokens, count) in asked.items():
        h.ask(request_id, tokens, count)
    h.run()
    assert h.answers == {request_id: counted(*one) for request_id, one in asked.items()}
    assert set(h.ended.values()) == {"length"}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_right_drafts_save_steps(drafts: int) -> None:
    h = World(max_drafts=drafts)
    h.ask("r", tokens=25)
    h.run()
    # The first step has no drafts, and one is in flight when the last token comes.
    assert len(h.model.batches) <= 2 + -(-24 // (1 + drafts))


@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_are_drawn_with_the_random_numbers_of_their_tokens(drafts: int) -> None:
    """Where a draft's distribution is the model's, the draft is right, however flat that is."""
    h = without_and_with(drafts, lambda h: h.ask("r", tokens=25, sampling=Sampling(seed=5)), scale=0.0)
    assert len(set(h.answers["r"])) > 10
    assert len(h.model.batches) <= 2 + -(-24 // (1 + drafts))


def test_a_stop_token_among_accepted_drafts_ends_the_request() -> None:
    h = World(max_drafts=3)
    h.ask("r", prompt=(1, 2, 3), tokens=20, stop_token_ids=(9,))
    h.run()
    assert h.answers["r"] == counted((3,), 6)
    assert h.ended["r"] == "stop"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_byte_and_token_is_right_when_requests_come_go_and_give_way(drafts: int, seed: int) -> None:
    rng = random.Random(seed)
    h = Caching(
        max_drafts=drafts,
        model=CountingModel(GUESSES["mixed"]),
        host_slots=rng.choice([260, 400]),
        device_slots=rng.choice([24, 40]),
        max_running=4,
    )
    asked = {}
    for number in range(24):
        request_id, length = f"r{number}", rng.choice([1, 3, 4, 5, 64, 65, 130])
        tokens = prompt(length, rng.randrange(3))
        asked[request_id] = tokens, rng.randint(1, 60)
        h.ask(request_id, *asked[request_id])
        for _ in range(rng.randrange(6)):
            h.turn()
        if rng.random() < 0.2 and (running := list(h.scheduler.requests)):
            left = rng.choice(running)
            asked.pop(left)
            h.scheduler.cancel(left, h.scheduler.requests[left].gateway)
    h.run(20_000)
    assert {request_id: h.answers[request_id] for request_id in asked} == {
        request_id: counted(*one) for request_id, one in asked.items()
    }
    assert h.metrics.retractions.labels("device")._value.get() + h.metrics.retractions.labels("host")._value.get()


def test_a_request_resumes_without_the_drafts_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    h = World(max_drafts=2)
    h.ask("r", tokens=40)
    while len(h.scheduler.requests["r"].generated) < 9:
        h.turn()
    with monkeypatch.context() as short:
        answers = [{"r": Tier.DEVICE}, {}]
        short.setattr(h.coordinator, "append_tokens", lambda request_ids: answers.pop(0))
        h.turn()
    assert h.state("r") is RequestState.RETRACTED
    h.run()
    assert h.answers["r"] == counted((3,), 40)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_penalties_bans_and_log_probabilities_see_accepted_drafts(drafts: int) -> None:
    sampling = Sampling(temperature=0, top_logprobs=2, frequency_penalty=0.5, bad_words=((7, 8),), min_tokens=3)
    without_and_with(
        drafts,
        lambda h: h.ask("r", prompt=(1, 2, 3), tokens=30, sampling=sampling, stop_token_ids=(5,)),
        scale=0.6,
        guesses="mixed",
    )


@pytest.mark.parametrize("drafts", DRAFTS)
def test_sampled_tokens_do_not_depend_on_drafts(drafts: int) -> None:
    def ask(h: World) -> None:
        for number in range(4):
            sampling = Sampling(temperature=1.0, seed=number, top_p=0.9 if number % 2 else 1.0)
            h.ask(f"r{number}", tokens=40, sampling=sampling)

    without_and_with(drafts, ask, scale=7.0)


def test_logits_that_are_not_finite_after_accepted_drafts_end_their_request_alone() -> None:
    h = World(max_drafts=3)
    h.model.overflows_after = 6
    h.ask("bad", prompt=(1, 2, 3), tokens=20)
    h.ask("good", prompt=(7, 8, 20), tokens=20)
    h.run()
    assert h.answers["good"] == counted((20,), 20)
    assert h.ended["bad"] == "error"
    assert h.answers["bad"] == [4, 5, 6]


def test_a_request_that_has_ended_disturbs_no_other_that_is_sampled_with_it() -> None:
    """It is padding in the step that was launched before its end was known."""

    def ask(h: World) -> None:
        sampling = Sampling(temperature=1.0, seed=3, top_p=0.9, top_k=50, min_p=0.01)
        for number, tokens in enumerate((3, 30)):
            h.ask(f"r{number}", tokens=tokens, sampling=sampling)

    assert set(without_and_with(2, ask, scale=7.0).ended.values()) == {"length"}
