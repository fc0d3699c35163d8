"""Which parts of a prompt are expected, taken and verified: in any order, each once, and no more than there can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.messages import Checksum, Checksums, ChunkDone, PrefillDone, Token
from decode_node.arrival import Arrival, Part, Stage

TOKENS = 10
SOME = Checksums.of([Checksum(buffer=0, start=0, stop=1, digest=1)])
NONE = Checksums()


def chunk(number: int, checksums: Checksums = SOME) -> ChunkDone:
    return ChunkDone(request_id="r", epoch=1, number=number, checksums=checksums)


def done(chunks: int, num_tokens: int = TOKENS, checksums: Checksums = SOME) -> PrefillDone:
    token = Token(token_id=1)
    return PrefillDone(request_id="r", epoch=1, token=token, num_tokens=num_tokens, chunks=chunks, checksums=checksums)


@given(st.data())
def test_it_is_verified_exactly_when_all_was_taken_and_all_of_that_holds(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, TOKENS - 1))
    messages: dict[Part, ChunkDone | PrefillDone] = {number: chunk(number) for number in range(chunks)}
    messages[None] = done(chunks)
    arrival = Arrival(TOKENS)
    to_take, to_verify = list(messages), []
    while to_take or to_verify:
        assert arrival.stage is (Stage.COMING if to_take else Stage.VERIFYING)
        if to_take and (not to_verify or data.draw(st.booleans())):
            part = to_take.pop(data.draw(st.integers(0, len(to_take) - 1)))
            assert not arrival.has(part)
            assert arrival.contradiction(messages[part]) is None
            arrival.take(messages[part])
            to_verify.append(part)
            assert arrival.has(part)
            assert arrival.contradiction(messages[part]) is None, "said again"
        else:
            arrival.verified(to_verify.pop(data.draw(st.integers(0, len(to_verify) - 1))))
    assert arrival.stage is Stage.VERIFIED
    assert arrival.num_checksums == chunks + 1
    assert arrival.done == messages[None]


def test_a_part_without_checksums_is_not_waited_for() -> None:
    arrival = Arrival(TOKENS)
    arrival.take(done(0, checksums=NONE))
    assert arrival.stage is Stage.VERIFIED
    arrival = Arrival(TOKENS)
    arrival.take(done(1, checksums=NONE))
    assert arrival.stage is Stage.COMING
    arrival.take(chunk(0, NONE))
    assert arrival.stage is Stage.VERIFIED


def test_what_cannot_be_is_named() -> None:
    arrival = Arrival(TOKENS)
    assert arrival.contradiction(done(0, num_tokens=9)) == "prefill covered 9 tokens, not 10"
    assert arrival.contradiction(done(9)) is None
    assert arrival.contradiction(done(10)) == "10 chunks before the last one, in 10 tokens"
    assert arrival.contradiction(chunk(8)) is None
    assert arrival.contradiction(chunk(9)) == "chunk 9 landed, of 9 that there can be"
    assert arrival.contradiction(chunk(2**62)) is not None, "which bounds what is remembered"
    arrival.take(chunk(4))
    assert arrival.contradiction(done(4)) == "chunk 4 landed, of 4 that there can be"
    arrival.take(done(5))
    assert arrival.contradiction(chunk(5)) == "chunk 5 landed, of 5 that there can be"
    assert arrival.contradiction(chunk(3)) is None


def test_what_was_never_taken_is_not_verified() -> None:
    arrival = Arrival(TOKENS)
    arrival.take(chunk(0))
    for part in (None, 1):
        with pytest.raises(RuntimeError, match="was verified and never taken"):
            arrival.verified(part)
