"""What is reported of a load follows from what came when, and streams become tokens, however they are cut."""

import json

import pytest

from benchmarks.percentiles import Percentiles
from benchmarks.serving.answer import Answer, Arrival, EventReader, StreamFailed, Usage
from benchmarks.serving.client import Failure, Outcome, Request
from benchmarks.serving.metrics import Answered, Counts, Slo, summarize
from benchmarks.serving.stub import token_event, usage_event


def outcome(
    *arrivals: tuple[float, int],
    started: float = 0.0,
    ended: float | None = None,
    usage: Usage | None = None,
    failure: Failure | None = None,
    asked: int = 4,
    sent: int | None = 10,
) -> Outcome:
    last = arrivals[-1][0] if arrivals else started
    came = tuple(Arrival(at, tokens) for at, tokens in arrivals)
    return Outcome(Request(b"", sent, asked), started, last if ended is None else ended, came, usage, failure)


STEADY = outcome((1.0, 1), (1.1, 1), (1.2, 1), (1.3, 1), usage=Usage(10, 4), ended=1.4)


@pytest.mark.parametrize(
    ("arrivals", "gaps", "tpot"),
    [
        ([(1.0, 1), (1.1, 1), (1.2, 1), (1.3, 1)], [0.1, 0.1, 0.1], 0.1),
        ([(1.0, 1), (1.6, 3)], [0.2, 0.2, 0.2], 0.2),
        ([(1.0, 3), (1.5, 1)], [0.5], 0.5 / 3),
        ([(1.0, 1)], [], None),
    ],
)
def test_tokens_of_one_event_share_the_time_since_the_event_before(
    arrivals: list[tuple[float, int]], gaps: list[float], tpot: float | None
) -> None:
    answered = Answered(outcome(*arrivals, ended=arrivals[-1][0] + 0.1))
    assert (answered.ttft, answered.latency) == (1.0, arrivals[-1][0] + 0.1)
    assert answered.gaps == pytest.approx(gaps)
    assert answered.tpot == (None if tpot is None else pytest.approx(tpot))


def test_usage_goes_before_what_was_counted() -> None:
    answered = Answered(outcome((1.0, 1), (1.6, 1), usage=Usage(11, 4)))
    assert (answered.input_tokens, answered.output_tokens) == (11, 4)
    assert answered.tpot == pytest.approx(0.2)
    without = Answered(outcome((1.0, 1), (1.6, 1)))
    assert (without.input_tokens, without.output_tokens) == (10, 2)
    assert Answered(outcome((1.0, 1), sent=None)).input_tokens == 0


def test_rates_are_of_what_was_answered_until_the_last_end() -> None:
    failed = outcome(started=1.0, ended=4.0, failure=Failure("HTTP 429", "full"))
    summary = summarize([STEADY, outcome((2.0, 1), (3.0, 1), started=0.5, ended=3.0), failed], Slo())
    assert summary.seconds == 4.0
    assert summary.answered == 2
    assert summary.failed == {"HTTP 429": 1}
    assert summary.requests_per_s == 0.5
    assert summary.input_tokens_per_s == 5.0
    assert summary.output_tokens_per_s == 1.5
    assert summary.in_flight == pytest.approx((1.4 + 2.5 + 3.0) / 4)
    assert summary.goodput is None
    assert summary.ttft == Percentiles.of([1.0, 1.5])


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft=1.0), True),
        (Slo(ttft=0.9), False),
        (Slo(itl=0.11), True),
        (Slo(itl=0.09), False),
        (Slo(ttft=1.0, itl=0.09), False),
    ],
)
def test_a_good_request_keeps_both_bounds(slo: Slo, good: bool) -> None:
    assert slo.is_met(Answered(STEADY)) is good
    assert summarize([STEADY], slo).goodput == pytest.approx(good / 1.4)


def test_counts_that_do_not_agree_are_counted() -> None:
    counts = Counts.of(
        [
            Answered(STEADY),
            Answered(outcome((1.0, 1), (1.1, 1), usage=Usage(10, 4))),
            Answered(outcome((1.0, 1), (1.1, 1), usage=Usage(11, 2))),
            Answered(outcome((1.0, 4))),
            Answered(outcome((1.0, 4), usage=Usage(99, 4), sent=None)),
        ]
    )
    assert counts == Counts(no_usage=1, miscounted=1, short=1, other_prompt=1)


STREAM = b': ping\n\nevent: x\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_come_out_whole_however_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]
    assert events == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_line_without_an_end_is_not_read_for_ever() -> None:
    reader, piece = EventReader(), bytes(1 << 20)
    assert [reader.feed(piece) for _ in range(16)] == [[]] * 16
    with pytest.raises(StreamFailed, match="lines of at most 16777216 bytes"):
        reader.feed(piece)


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
