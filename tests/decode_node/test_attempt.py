"""Which parts of a prompt are expected, taken and verified: in any order, each once, and no more than there can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.messages import AttemptId, ChunkDone, PrefillDone
from decode_node.attempt import AttemptState, ChunkNumber, PrefillAttempt
from kvcache.extents import Extent, HostSlots
from tests.decode_node.remote_world import attempt_to_fill
from transfer.memory import Checksum, Checksums

TOKENS = 10
R = AttemptId("decode", "r", 1)
SOME = Checksums.of([Checksum(buffer=0, start=0, stop=1, digest=1)])
NONE = Checksums()


def accepted_attempt() -> PrefillAttempt:
    attempt = attempt_to_fill(HostSlots((Extent(0, TOKENS),)), TOKENS)
    attempt.accept(0.0)
    return attempt


def chunk(number: int, checksums: Checksums = SOME) -> ChunkDone:
    return ChunkDone(attempt=R, number=number, checksums=checksums)


def done(chunks: int, num_tokens: int = TOKENS, checksums: Checksums = SOME) -> PrefillDone:
    return PrefillDone(attempt=R, num_tokens=num_tokens, chunks=chunks, checksums=checksums)


@given(st.data())
def test_it_is_verified_exactly_when_all_was_taken_and_all_of_that_holds(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, TOKENS - 1))
    messages: dict[ChunkNumber, ChunkDone | PrefillDone] = {number: chunk(number) for number in range(chunks)}
    messages[None] = done(chunks)
    attempt = accepted_attempt()
    to_take, to_verify = list(messages), []
    while to_take or to_verify:
        assert attempt.state is (AttemptState.ACCEPTED if to_take else AttemptState.ANNOUNCED)
        assert not attempt.is_verified
        if to_take and (not to_verify or data.draw(st.booleans())):
            part = to_take.pop(data.draw(st.integers(0, len(to_take) - 1)))
            assert not attempt.has(part)
            assert attempt.rejection_reason(messages[part]) is None
            attempt.take(messages[part], 0.0)
            to_verify.append(part)
            assert attempt.has(part)
            assert attempt.rejection_reason(messages[part]) is None, "said again"
        else:
            attempt.verified(to_verify.pop(data.draw(st.integers(0, len(to_verify) - 1))))
    assert attempt.is_verified
    assert attempt.num_checksums == chunks + 1
    assert attempt.done == messages[None]


def test_a_part_without_checksums_is_not_waited_for() -> None:
    attempt = accepted_attempt()
    attempt.take(done(0, checksums=NONE), 0.0)
    assert attempt.is_verified
    attempt = accepted_attempt()
    attempt.take(done(1, checksums=NONE), 0.0)
    assert attempt.state is AttemptState.ACCEPTED
    attempt.take(chunk(0, NONE), 0.0)
    assert attempt.is_verified


def test_what_cannot_be_is_named() -> None:
    attempt = accepted_attempt()
    assert attempt.rejection_reason(done(0, num_tokens=9)) == "prefill covered 9 tokens, not 10"
    assert attempt.rejection_reason(done(9)) is None
    assert attempt.rejection_reason(done(10)) == "10 chunks before the last one, in 10 tokens"
    assert attempt.rejection_reason(chunk(8)) is None
    assert attempt.rejection_reason(chunk(9)) == "chunk 9 landed, of 9 that there can be"
    assert attempt.rejection_reason(chunk(2**62)) is not None, "which bounds what is remembered"
    attempt.take(chunk(4), 0.0)
    assert attempt.rejection_reason(done(4)) == "chunk 4 landed, of 4 that there can be"
    attempt.take(done(5), 0.0)
    assert attempt.rejection_reason(chunk(5)) == "chunk 5 landed, of 5 that there can be"
    assert attempt.rejection_reason(chunk(3)) is None


def test_what_was_never_taken_is_not_verified() -> None:
    attempt = accepted_attempt()
    attempt.take(chunk(0), 0.0)
    for part in (None, 1):
        with pytest.raises(RuntimeError, match="was verified and never taken"):
            attempt.verified(part)


def test_an_attempt_ends_once() -> None:
    attempt = accepted_attempt()
    attempt.take(done(0, checksums=NONE), 0.0)
    attempt.move(AttemptState.LANDED, 0.0)
    for state in AttemptState:
        with pytest.raises(RuntimeError, match=f"is landed and cannot become {state.value}"):
            attempt.move(state, 0.0)
