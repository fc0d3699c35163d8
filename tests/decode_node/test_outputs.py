"""Tokens are streamed once, and kept for a gateway that has missed some: until it has all, and no longer."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.metrics import Metrics
from control.messages import FinishReason, Generate, Output, Outputs, Peer, Token
from control.prompt_logprobs import PromptLogprobTable
from decode_node import outputs
from decode_node.outputs import OutputStream, StreamedTokens
from decode_node.request import Request
from tests.decode_node.world import GATEWAY
from tests.prefill_node.fakes import FakeControl

OTHER = Peer(role="gateway", address="127.0.0.1:2", boot_id="other")
KEY = ("ended", "r", GATEWAY.boot_id)


def a_token(number: int) -> Token:
    return Token(token_id=number, logprob=-number / 7, top_logprobs=((number, -number / 7), (number + 1, -number / 3)))


@dataclass
class Harness:
    control: FakeControl = field(default_factory=FakeControl)

    def __post_init__(self) -> None:
        self.stream = OutputStream(self.control, Metrics())  # type: ignore[arg-type]
        self.request = Request(Generate(request_id="r", prompt_ids=(1,), max_new_tokens=5000), GATEWAY)

    def step(self, count: int, finish_reason: FinishReason | None = None) -> None:
        """One step gives `count` tokens, the last with that reason."""
        first = len(self.request.generated)
        numbers = range(first, first + count)
        self.request.generated.extend(numbers)
        self.stream.tokens(self.request, numbers, finish_reason, [a_token(number) for number in numbers])
        self.stream.flush()

    def decode(self, count: int, finish_reason: FinishReason | None = None) -> None:
        """Steps of one token each, the last with that reason. What is streamed of them is lost on the way."""
        for left in reversed(range(count)):
            self.step(1, None if left else finish_reason)
        self.control.sent.clear()

    def resent(self, start: int, gateway: Peer = GATEWAY) -> list[Output]:
        """What a gateway is answered that asks for the tokens from `start` on."""
        self.stream.resend("r", start, gateway)
        self.stream.flush()
        assert all(to == gateway for to, _ in self.control.sent)
        messages = self.control.take(Outputs)
        return [output for message in messages if isinstance(message, Outputs) for output in message.rows()]

    def tokens_kept(self) -> int:
        return sum(len(stream.tokens) for stream in self.stream._streams.values())

    def repeats_the_end(self) -> bool:
        return KEY in self.control.repeated


def test_missing_tokens_are_sent_again_with_their_log_probabilities() -> None:
    h = Harness()
    h.decode(10)
    [output] = h.resent(4)
    assert output == Output(request_id="r", start=4, tokens=tuple(a_token(number) for number in range(4, 10)))
    assert h.resent(10) == [], "nothing is missing"
    h.decode(1)
    [output] = h.resent(10)
    assert output.tokens == (a_token(10),)


def test_a_finished_request_is_sent_again_until_its_gateway_has_it() -> None:
    h = Harness()
    h.decode(3, "stop")
    outputs = h.resent(1)
    assert [token for output in outputs[:-1] for token in output.tokens] == [a_token(1), a_token(2)]
    assert (outputs[-1].start, outputs[-1].tokens, outputs[-1].finish_reason) == (2, (a_token(2),), "stop")
    assert h.repeats_the_end()
    h.stream.ended("r", GATEWAY)
    assert not h.repeats_the_end()
    assert h.tokens_kept() == 0
    [output] = h.resent(1)
    assert (output.tokens, output.finish_reason) == ((), "abort"), "nothing is left of it"


def test_many_tokens_are_sent_again_in_messages_of_bounded_size() -> None:
    h = Harness()
    h.decode(2500)
    answers = h.resent(10)
    assert [output.start for output in answers] == [10, 1034, 2058]
    assert [token.token_id for output in answers for token in output.tokens] == list(range(10, 2500))


def test_prompt_log_probabilities_come_in_pieces_before_the_first_token() -> None:
    h = Harness()
    h.request = Request(Generate(request_id="r", prompt_ids=(1,) * 3000, max_new_tokens=9, prompt_logprobs=20), GATEWAY)
    h.request.prompt_logprobs = table = PromptLogprobTable(3000, 20)
    h.request.generated.append(5)
    h.stream.tokens(h.request, [5], "stop", [a_token(5)])
    h.stream.flush()
    *pieces, last = h.control.outputs()
    assert [output.prompt_logprobs for output in pieces] == list(table.pieces())
    assert len(pieces) == 2
    assert last.tokens == (a_token(5),)
    h.control.sent.clear()
    assert h.resent(0) == [*pieces, Output(request_id="r", start=0, tokens=(a_token(5),)), last]
    assert h.resent(1) == [last]


def test_the_tokens_of_a_step_are_one_output_and_one_interval() -> None:
    h = Harness()
    intervals = h.stream._metrics.inter_token
    h.step(3)
    h.step(4)
    first, second = h.control.outputs()
    assert (first.start, first.tokens) == (0, (a_token(0), a_token(1), a_token(2)))
    assert (second.start, len(second.tokens)) == (3, 4)
    assert sum(bucket.get() for bucket in intervals._buckets) == 1
    assert h.stream._metrics.generated_tokens._value.get() == 7


def test_the_token_that_ends_a_request_is_an_output_of_its_own() -> None:
    h = Harness()
    h.step(3, "length")
    before, last = h.control.outputs()
    assert (before.start, before.tokens, before.finish_reason) == (0, (a_token(0), a_token(1)), None)
    assert (last.start, last.tokens, last.finish_reason) == (2, (a_token(2),), "length")
    assert h.repeats_the_end()


def test_only_the_gateway_of_a_request_gets_its_tokens() -> None:
    h = Harness()
    h.decode(3)
    [output] = h.resent(0, OTHER)
    assert (output.tokens, output.finish_reason) == ((), "abort")
    h.stream.ended("r", OTHER)
    assert len(h.resent(0)) == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_of_a_request_that_was_given_up_only_that_is_kept(reason: FinishReason) -> None:
    h = Harness()
    h.decode(100)
    h.stream.end(h.request, reason, "why")
    h.stream.flush()
    assert h.tokens_kept() == 0
    [output] = h.resent(50)
    assert (output.start, output.tokens, output.finish_reason, output.error) == (100, (), reason, "why")


def test_a_request_whose_client_left_after_its_end_is_not_kept() -> None:
    h = Harness()
    h.decode(100, "length")
    h.stream.unknown("r", GATEWAY)
    assert h.tokens_kept() == 0


def test_tokens_that_nobody_acknowledges_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("decode_node.outputs.time.monotonic", lambda: now)
    h = Harness()
    h.decode(100, "length")
    now += outputs._KEPT_FOR_S
    h.stream.flush()
    assert h.tokens_kept() == 100
    now += 1
    h.stream.flush()
    assert h.tokens_kept() == 0
    assert [output.finish_reason for output in h.resent(3)] == ["abort"]


def test_tokens_of_a_request_that_runs_are_kept_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("decode_node.outputs.time.monotonic", lambda: now)
    h = Harness()
    h.decode(3)
    now += 10_000
    h.decode(1)
    assert h.tokens_kept() == 4


tokens = st.builds(
    Token,
    token_id=st.integers(0, 2**31 - 1),
    logprob=st.floats(allow_nan=False, allow_infinity=False),
    top_logprobs=st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False, allow_infinity=False)), max_size=20
    ).map(tuple),
)


@given(st.lists(tokens, max_size=10), st.booleans(), st.integers(0, 10), st.integers(0, 12), st.integers(0, 12))
def test_tokens_come_out_as_they_went_in(streamed: list[Token], reports: bool, cut: int, start: int, stop: int) -> None:
    kept = StreamedTokens()
    for part in (streamed[:cut], streamed[cut:]):
        kept.extend([token.token_id for token in part], part if reports else ())
    assert len(kept) == len(streamed)
    expected = streamed if reports else [Token(token.token_id) for token in streamed]
    assert kept.between(start, stop) == tuple(expected[start:stop])
