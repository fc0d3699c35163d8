"""What is reported of a load follows from what came when."""

import pytest

from benchmarks.percentiles import Percentiles
from benchmarks.serving.answer import Arrival, Usage
from benchmarks.serving.client import Failure, Outcome, Request
from benchmarks.serving.metrics import Answered, Counts, Slo, summarize


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
