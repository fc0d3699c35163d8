"""What is known of a request across the decode nodes that it was at."""

import pytest

from control.messages import Generate, Peer, Sampling, Token
from gateway.errors import ApiError
from gateway.generation import Generation, GenerationLimits, GenerationPhase, NodeFailed, TokenizedRequest

GENERATE = Generate(
    request_id="r", prompt_ids=(1, 2), max_new_tokens=9, sampling=Sampling(seed=7), prompt_logprobs=1, cache_salt="s"
)
NODES = [Peer(role="decode", address=f"127.0.0.1:{port}", boot_id=f"boot-{port}") for port in range(1, 6)]


def generation(migrations: int = 3) -> Generation:
    request = TokenizedRequest(GENERATE, streams=True, arrived=100.0, deadline=200.0)
    return Generation(request, GenerationLimits(migrations, token_timeout=10.0))


def take(one: Generation, *ids: int, now: float = 101.0) -> None:
    one.took([Token(token_id) for token_id in ids], now)


def test_the_first_try_is_the_request_itself() -> None:
    assert generation().placed() is GENERATE


def test_a_later_try_has_an_id_of_its_own_and_the_tokens_so_far() -> None:
    one = generation()
    one.placed()
    one.failed(NODES[0], NodeFailed("died", died=True))
    assert one.placed() == GENERATE.model_copy(update={"request_id": "r.2"}), "no token has arrived"
    take(one, 5, 6)
    one.failed(NODES[1], NodeFailed("aborted"))
    own = {"request_id": "r.3", "generated": (5, 6), "prompt_logprobs": None}
    assert one.placed() == GENERATE.model_copy(update=own)


def test_drafts_of_all_tries_count() -> None:
    one = generation()
    outcome = one.request.outcome
    one.placed()
    for drafts in ((3, 1), (6, 2)):
        outcome.note_drafts(drafts)
    take(one, 5)
    one.failed(NODES[0], NodeFailed("died", died=True))
    one.placed()
    assert outcome.drafts == (6, 2)
    outcome.note_drafts((3, 3))
    assert outcome.drafts == (9, 5)


def test_phases_follow_each_other() -> None:
    one = generation()
    seen = [one.phase]
    one.placed()
    seen.append(one.phase)
    take(one)
    assert one.phase is GenerationPhase.WAITING, "no token came"
    take(one, 5)
    seen.append(one.phase)
    one.failed(NODES[0], NodeFailed("aborted"))
    seen.append(one.phase)
    one.move(GenerationPhase.ENDED)
    assert seen == [
        GenerationPhase.PLACING,
        GenerationPhase.WAITING,
        GenerationPhase.STREAMING,
        GenerationPhase.PLACING,
    ]
    with pytest.raises(RuntimeError, match="request r is ended and cannot become waiting"):
        one.placed()


@pytest.mark.parametrize("tokens", [(), (5,)])
def test_a_request_that_was_at_two_nodes_when_they_died_goes_to_no_third(tokens: tuple[int, ...]) -> None:
    one = generation()
    one.placed()
    take(one, *tokens)
    one.failed(NODES[0], NodeFailed("died", died=True))
    one.placed()
    take(one, *tokens)
    one.failed(NODES[1], NodeFailed("aborted"))
    one.placed()
    with pytest.raises(ApiError, match="at 2 decode nodes when they were lost"):
        one.failed(NODES[2], NodeFailed("died", died=True))


def test_ranks_that_died_together_are_one_death() -> None:
    one = generation()
    for node, group in ((NODES[0], "a"), (NODES[1], "a"), (NODES[2], "b")):
        one.placed(group)
        if group == "b":
            with pytest.raises(ApiError, match="at 2 decode nodes when they were lost"):
                one.failed(node, NodeFailed("died", died=True))
        else:
            one.failed(node, NodeFailed("died", died=True))
            assert one.dead == {"a"}


def test_a_begun_request_moves_as_often_as_its_limit_allows() -> None:
    one = generation(migrations=1)
    for node in NODES[:3]:
        one.placed()
        one.failed(node, NodeFailed("draining"))
    one.placed()
    take(one, 5)
    one.failed(NODES[3], NodeFailed("aborted"))
    one.placed()
    take(one, 6)
    with pytest.raises(ApiError, match="lost at its decode node"):
        one.failed(NODES[4], NodeFailed("aborted"))


@pytest.mark.parametrize("died", [False, True])
def test_a_node_that_refused_may_get_it_after_it_was_elsewhere(died: bool) -> None:
    one = generation()
    one.placed()
    one.failed(NODES[0], NodeFailed("full", retry_after=1.0))
    one.placed()
    one.failed(NODES[1], NodeFailed("draining"))
    assert set(one.failures) == {"boot-1", "boot-2"}
    one.placed()
    if not died:
        take(one, 5)
    one.failed(NODES[2], NodeFailed("aborted", died=died))
    assert set(one.failures) == {"boot-3"}


def test_a_request_may_take_long_if_its_tokens_come() -> None:
    one = generation()
    one.placed()
    assert not one.is_overdue(109.0)
    assert one.is_overdue(111.0)
    take(one, 5, now=108.0)
    assert not one.is_overdue(117.0)
    take(one, 6, now=199.0)
    assert one.is_overdue(201.0), "the whole request has a deadline"
