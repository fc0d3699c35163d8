"""Streams become tokens, however they are cut."""

import json

import pytest

from benchmarks.serving.answer import Answer, Arrival, EventReader, StreamFailed, Usage
from benchmarks.serving.stub import token_event, usage_event

STREAM = b': ping\n\nevent: x\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_come_out_whole_however_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]
    assert events == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def taken(*events: dict[str, object]) -> Answer:
    answer = Answer()
    for at, event in enumerate(events):
        answer.take(float(at), json.dumps(event).encode())
    return answer


def test_an_event_is_a_token_and_usage_comes_at_the_end() -> None:
    answer = taken(token_event("a"), token_event("b", finish_reason="length"), usage_event(5, 2))
    assert answer.arrivals == [Arrival(0.0, 1), Arrival(1.0, 1)]
    assert answer.usage == Usage(5, 2)
    assert not answer.done
    answer.take(9.0, b"[DONE]")
    assert answer.done


def test_a_token_may_have_no_text_yet_but_the_end_is_no_token() -> None:
    answer = taken(token_event(""), token_event("é"), token_event("", finish_reason="stop"))
    assert [arrival.at for arrival in answer.arrivals] == [0.0, 1.0]


def test_token_ids_say_how_many_tokens_an_event_has() -> None:
    answer = taken(
        token_event("abc", token_ids=[1, 2, 3]), token_event("rest", token_ids=[]), token_event(token_ids=[4])
    )
    assert answer.arrivals == [Arrival(0.0, 3), Arrival(2.0, 1)]
    assert answer.token_ids == [1, 2, 3, 4]


def test_usage_may_say_how_much_of_a_prompt_was_cached() -> None:
    assert taken(usage_event(100, 2, cached_tokens=64)).usage == Usage(100, 2, 64)
    nothing = usage_event(100, 2)
    nothing["usage"]["prompt_tokens_details"] = None
    assert taken(nothing).usage == Usage(100, 2, None)


def test_a_usage_with_every_event_says_how_many_tokens_it_has() -> None:
    growing = [{**token_event(), "usage": usage_event(5, tokens)["usage"]} for tokens in (1, 3, 3, 4)]
    answer = taken(*growing, usage_event(5, 4))
    assert answer.arrivals == [Arrival(0.0, 1), Arrival(1.0, 2), Arrival(3.0, 1)]


def test_a_usage_with_the_last_event_alone_does_not_hide_a_miscount() -> None:
    last = {**token_event(finish_reason="length"), "usage": usage_event(5, 7)["usage"]}
    answer = taken(token_event(), last)
    assert sum(arrival.tokens for arrival in answer.arrivals) == 2
    assert answer.usage == Usage(5, 7)


@pytest.mark.parametrize("error", [{"message": "no node", "code": 503}, "no node"])
def test_an_error_in_the_stream_is_a_failure(error: object) -> None:
    with pytest.raises(StreamFailed, match="no node") as failed:
        taken(token_event(), {"error": error})
    assert failed.value.kind == "error event"


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'"x"', b'{"choices": [], "usage": {}, "error": 0, "x": NaNN}'])
def test_what_is_no_chunk_is_a_failure_that_shows_it(data: bytes) -> None:
    with pytest.raises(StreamFailed, match="found") as failed:
        Answer().take(0.0, data)
    assert failed.value.kind == "malformed event"
