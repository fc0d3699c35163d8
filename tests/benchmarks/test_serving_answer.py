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


ONE = token_event()


def with_usage(tokens: int, event: dict[str, object] = ONE) -> dict[str, object]:
    return {**event, "usage": usage_event(5, tokens)["usage"]}


@pytest.mark.parametrize(
    ("events", "arrivals"),
    [
        ([ONE, token_event("b", finish_reason="length"), usage_event(5, 2)], [(0.0, 1), (1.0, 1)]),
        # A token may have no text yet; the end alone is no token.
        ([token_event(""), token_event("é"), token_event("", finish_reason="stop")], [(0.0, 1), (1.0, 1)]),
        # Token ids say how many an event has.
        ([token_event("abc", token_ids=[1, 2, 3]), token_event(token_ids=[]), ONE], [(0.0, 3), (2.0, 1)]),
        # So does a usage that grows with every event, and one of the last event alone hides no miscount.
        ([*map(with_usage, (1, 3, 3, 4)), usage_event(5, 4)], [(0.0, 1), (1.0, 2), (3.0, 1)]),
        ([ONE, with_usage(7, token_event(finish_reason="length"))], [(0.0, 1), (1.0, 1)]),
    ],
)
def test_events_become_tokens(events: list[dict[str, object]], arrivals: list[tuple[float, int]]) -> None:
    assert taken(*events).arrivals == [Arrival(*arrival) for arrival in arrivals]


def test_token_ids_are_kept_and_the_stream_has_an_end() -> None:
    answer = taken(token_event("a", token_ids=[1, 2]), token_event(token_ids=[4]))
    assert answer.token_ids == [1, 2, 4]
    assert not answer.done
    answer.take(9.0, b"[DONE]")
    assert answer.done


def test_usage_may_say_how_much_of_a_prompt_was_cached() -> None:
    assert taken(usage_event(100, 2, cached_tokens=64)).usage == Usage(100, 2, 64)
    nothing = usage_event(100, 2)
    nothing["usage"]["prompt_tokens_details"] = None
    assert taken(nothing).usage == Usage(100, 2, None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        *((f'{{"error": {error}}}', "error event") for error in ('{"message": "no node", "code": 503}', '"no node"')),
        *((data, "malformed event") for data in ("{", "[]", "{}", '"x"', '{"choices": [], "usage": {}, "x": NaNN}')),
    ],
)
def test_what_is_no_chunk_is_a_failure_that_shows_it(data: str, kind: str) -> None:
    with pytest.raises(StreamFailed, match="no node" if kind == "error event" else "found") as failed:
        Answer().take(0.0, data.encode())
    assert failed.value.kind == kind
