"""Tokens and ends of answers that are lost on the way from decode nodes, or come twice."""

import pytest

from control.messages import Output, Resend, Token
from gateway import decode_client
from tests.gateway.nodes import wait_until
from tests.gateway.world import World

NEVER = 1000
"""More often than a gateway asks again."""


def lose(world: World, count: int, *lost: int, deaf: int = 0) -> None:
    """The decode node says the alphabet, a letter in each message, of which some are lost."""
    world.decode.chunks = [[ord("a") + number] for number in range(count)]
    world.decode.lost, world.decode.deaf_to_resend = frozenset(lost), deaf


def text_of(world: World, **fields: object) -> str:
    return str(world.post(**fields).json()["choices"][0]["text"])


def test_the_end_of_a_request_is_answered_each_time_and_counts_once(fresh: World) -> None:
    """It is repeated until it is answered: were it lost, the client would wait until --request-timeout."""
    last = Output(request_id="replaced", start=2, tokens=(Token(token_id=99),), finish_reason="length")
    fresh.decode.extra_outputs = [last, last]
    [choice] = fresh.post(max_tokens=3, return_token_ids=True).json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    wait_until(lambda: len(fresh.decode.ended) == 2)
    assert len(set(fresh.decode.ended)) == 1
    assert fresh.decode.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lost", "asked_from"),
    [({1}, [1]), ({0, 1}, [0]), ({2, 3, 5}, [2]), ({6}, [6]), ({1, 7}, [1]), (set(range(7)), [0])],
)
def test_lost_tokens_are_asked_for_again(fresh: World, stream: bool, lost: set[int], asked_from: list[int]) -> None:
    lose(fresh, 8, *lost)
    answer = fresh.complete(prompt="x", max_tokens=8, stream=stream, logprobs=2)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "abcdefgh"
    logprobs = [logprob for choice in choices if choice.logprobs for logprob in choice.logprobs.token_logprobs]
    assert logprobs == [-0.5] * 8
    assert sorted({asked.start for asked in fresh.decode.resent}) == asked_from
    assert fresh.decode.cancelled == []
    wait_until(lambda: set(fresh.decode.ended) == {fresh.decode.generated[0].request_id})


def test_a_request_for_tokens_is_repeated_until_it_is_answered(fresh: World) -> None:
    lose(fresh, 4, 1, deaf=2)
    assert text_of(fresh, max_tokens=4) == "abcd"
    assert {asked.start for asked in fresh.decode.resent} == {1}
    assert len(fresh.decode.resent) >= 3
    wait_until(lambda: fresh.decode.ended)


def test_what_is_lost_of_what_was_sent_again_is_asked_for_from_there(fresh: World) -> None:
    lose(fresh, 8, 1)
    decode, resend = fresh.decode, fresh.decode._resend

    def some_is_lost(asked: Resend) -> None:
        if asked.start == 1:
            for number in (1, 2, 5, 6, 7):
                decode.send(decode._answers[asked.request_id][number])
        else:
            resend(asked)

    decode._resend = some_is_lost  # type: ignore[method-assign]
    assert text_of(fresh, max_tokens=8) == "abcdefgh"
    assert list(dict.fromkeys(asked.start for asked in decode.resent)) == [1, 3]


def test_an_end_is_not_acknowledged_while_tokens_before_it_are_missing(fresh: World) -> None:
    """The decode node would forget them."""
    lose(fresh, 3, 1, deaf=NEVER)
    posted = fresh.post_later(max_tokens=3)
    wait_until(lambda: len(fresh.decode.resent) > 1)
    assert fresh.decode.ended == []
    fresh.decode.deaf_to_resend = 0
    assert posted.result().json()["choices"][0]["text"] == "abc"
    wait_until(lambda: fresh.decode.ended)


def test_tokens_that_never_come_end_the_request(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "RESEND_FOR_S", 0.3)
    lose(fresh, 4, 1, 2, deaf=NEVER)
    answer = fresh.post(max_tokens=4)
    assert answer.status_code == 500
    assert "tokens 1 to 2 were lost on the way" in answer.json()["error"]["message"]
    wait_until(lambda: fresh.decode.cancelled)
    asked = len(fresh.decode.resent)
    lose(fresh, 4)
    assert fresh.post(max_tokens=4).status_code == 200
    assert len(fresh.decode.resent) == asked, "nobody asks for them any more"


def test_what_a_node_has_given_up_is_not_waited_for(fresh: World) -> None:
    """It answers that it keeps nothing of the request."""
    lose(fresh, 3, 1)
    fresh.decode._resend = lambda asked: fresh.decode.send(  # type: ignore[method-assign]
        Output(request_id=asked.request_id, start=0, finish_reason="abort")
    )
    with fresh.stream(max_tokens=3) as data:
        assert "the request was lost at its decode node" in "".join(data)
    assert len(fresh.decode.resent) == 1
