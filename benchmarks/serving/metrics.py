"""From what came when to the figures that are reported. Seconds throughout."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from benchmarks.percentiles import Percentiles
from benchmarks.serving.client import Outcome


@dataclass(frozen=True)
class Answered:
    """The figures of one request that was answered."""

    outcome: Outcome

    @property
    def ttft(self) -> float:
        """From the request, its connection included, to the first token."""
        return self.outcome.arrivals[0].at - self.outcome.started

    @property
    def latency(self) -> float:
        """From the request to the end of its answer."""
        return self.outcome.ended - self.outcome.started

    @cached_property
    def gaps(self) -> list[float]:
        """The times between tokens.

        n tokens in one event have come n times faster than one: they count as n gaps of an n-th of the time since the
        event before. Tokens that come with the first one have no gap.
        """
        arrivals = self.outcome.arrivals
        gaps: list[float] = []
        for before, after in pairwise(arrivals):
            gaps += [(after.at - before.at) / after.tokens] * after.tokens
        return gaps

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        arrivals, tokens = self.outcome.arrivals, self.output_tokens
        return (arrivals[-1].at - arrivals[0].at) / (tokens - 1) if tokens > 1 else None

    @property
    def counted(self) -> int:
        """Tokens, by the events that they came in."""
        return sum(arrival.tokens for arrival in self.outcome.arrivals)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as the service says, else as they were counted."""
        return self.outcome.usage.completion_tokens if self.outcome.usage else self.counted

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt: as the service says, else as they were sent; 0 if neither is known."""
        return self.outcome.usage.prompt_tokens if self.outcome.usage else self.outcome.request.input_tokens or 0


@dataclass(frozen=True)
class Slo:
    """What a request must keep to be good. ttft, itl: seconds; None demands nothing.

    itl: what 99% of the request's own gaps must keep.
    """

    ttft: float | None = None
    itl: float | None = None

    def __bool__(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def is_met(self, answered: Answered) -> bool:
        if self.ttft is not None and answered.ttft > self.ttft:
            return False
        return self.itl is None or not answered.gaps or float(np.percentile(answered.gaps, 99)) <= self.itl


@dataclass(frozen=True)
class Counts:
    """Requests whose tokens are not what they should be.

    no_usage: the service did not say. miscounted: it says another number than came in events. short: fewer tokens than
    asked for. other_prompt: it counts other than was sent, such as a token that it puts before a prompt.
    """

    no_usage: int
    miscounted: int
    short: int
    other_prompt: int

    @classmethod
    def of(cls, answered: Sequence[Answered]) -> "Counts":
        reported = [(each, each.outcome.usage) for each in answered]
        return cls(
            no_usage=sum(usage is None for _, usage in reported),
            miscounted=sum(usage is not None and usage.completion_tokens != each.counted for each, usage in reported),
            short=sum(each.output_tokens < each.outcome.request.output_tokens for each in answered),
            other_prompt=sum(
                usage is not None and each.outcome.request.input_tokens not in (None, usage.prompt_tokens)
                for each, usage in reported
            ),
        )


@dataclass(frozen=True)
class Summary:
    """One load point. Rates are of answered requests, over the time from the first request to the last end.

    in_flight: requests under way, on average. failed: requests by kind of failure. goodput: requests per second that
    kept the SLO, None without one. Percentiles are None where nothing was measured.
    """

    seconds: float
    answered: int
    failed: Mapping[str, int]
    in_flight: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput: float | None
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    latency: Percentiles | None
    counts: Counts


def summarize(outcomes: Sequence[Outcome], slo: Slo) -> Summary:
    """The figures of all requests of a load point, of which there is at least one."""
    answered = [Answered(outcome) for outcome in outcomes if outcome.failure is None]
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.started for outcome in outcomes)
    return Summary(
        seconds=seconds,
        answered=len(answered),
        failed=dict(Counter(outcome.failure.kind for outcome in outcomes if outcome.failure)),
        in_flight=sum(outcome.ended - outcome.started for outcome in outcomes) / seconds,
        requests_per_s=len(answered) / seconds,
        input_tokens_per_s=sum(each.input_tokens for each in answered) / seconds,
        output_tokens_per_s=sum(each.output_tokens for each in answered) / seconds,
        goodput=sum(map(slo.is_met, answered)) / seconds if slo else None,
        ttft=_percentiles([each.ttft for each in answered]),
        itl=_percentiles([gap for each in answered for gap in each.gaps]),
        tpot=_percentiles([tpot for each in answered if (tpot := each.tpot) is not None]),
        latency=_percentiles([each.latency for each in answered]),
        counts=Counts.of(answered),
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    return Percentiles.of(values) if values else None
