"""What is told of chunks: their checksums, and log probabilities of the prompt."""

import pytest

from control.messages import Abort, Admitted, AttemptId, ChunkDone, ChunkTaken, Message, Peer, PrefillDone, Quiesced
from control.prompt_logprobs import PromptLogprobTable
from prefill_node.offer import Offer
from tests.identity import IDENTITY
from tests.prefill_node.world import DECODE, R, World, checksum_of, request
from transfer.memory import Checksums


def chunk_done(number: int, start: int, stop: int) -> ChunkDone:
    return ChunkDone(attempt=R, number=number, checksums=Checksums.of([checksum_of(start, stop)]))


def test_the_checksums_of_a_chunk_are_told_when_it_has_landed() -> None:
    h = World()
    h.receive(request(token_ids=tuple(range(14)), extents=((0, 14),)))
    h.start()
    h.sent(checksums=True)
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(0, 0, 6))], "whether or not the pass has ended"
    h.receive(ChunkTaken(attempt=R, number=0))
    assert not h.control.repeated
    h.finish()
    h.compute()
    h.compute()
    h.sent(checksums=True)
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(1, 6, 12))]
    h.sent(checksums=True)
    (_, second), (_, done) = h.control.repeated.values()
    assert second == chunk_done(1, 6, 12), "it was not answered yet"
    assert isinstance(done, PrefillDone)
    assert (done.chunks, list(done.checksums.rows())) == (2, [checksum_of(12, 14)])
    h.receive(ChunkTaken(attempt=R, number=1))
    assert len(h.control.repeated) == 1
    h.receive(Admitted(attempt=R))
    assert not h.control.repeated


def positions_of(*messages: Message) -> list[int]:
    """The positions whose log probabilities these messages bring."""
    told = [
        piece
        for message in messages
        if isinstance(message, ChunkDone | PrefillDone)
        for piece in message.prompt_logprobs
    ]
    return [position for piece in told for position in range(piece.start, piece.stop)]


@pytest.mark.parametrize("checksums", [True, False])
def test_log_probabilities_are_told_once_by_the_next_message(checksums: bool) -> None:
    h = World()
    h.receive(request(token_ids=tuple(range(14)), extents=((0, 14),), prompt_logprobs=2, last_token_id=77))
    h.start()
    h.sent(checksums=checksums)
    assert not positions_of(*h.repeated), "they are not computed yet"
    h.finish()
    h.compute()
    h.sent(checksums=checksums)
    h.compute()
    h.sent(checksums=checksums)
    *chunks, done = h.repeated
    assert len(chunks) == (2 if checksums else 1), "only a chunk that brings something has a message"
    last = chunks[-1]
    assert isinstance(last, ChunkDone)
    assert positions_of(last) == list(range(1, 13))
    assert positions_of(done) == [13, 14]
    assert isinstance(done, PrefillDone)
    table = PromptLogprobTable(15, 2)
    for piece in (*last.prompt_logprobs, *done.prompt_logprobs):
        assert table.rejection_reason(piece) is None
        table.add(piece)
    assert table.complete
    assert table.floats[:, 0].tolist() == [-position for position in range(1, 15)]
    assert table.ints[:, 0].tolist() == [*range(1, 14), 77], "the last one is that of the token which is decoded"


def test_a_pass_gives_log_probabilities_to_those_that_ask_for_them() -> None:
    h = World()
    h.receive(request(token_ids=(1, 2, 3), extents=((0, 3),)))
    other = AttemptId("decode", "other", 1)
    h.receive(request(attempt=other, token_ids=(4, 5), extents=((0, 2),), prompt_logprobs=0, last_token_id=6))
    h.compute()
    h.sent()
    h.sent()
    dones = {message.attempt: message for message in h.repeated if isinstance(message, PrefillDone)}
    assert positions_of(dones[R]) == []
    assert positions_of(dones[other]) == [1, 2]


def test_more_log_probabilities_than_a_message_should_have_are_refused() -> None:
    few = request(prompt_logprobs=20, last_token_id=5)
    offer = Offer(IDENTITY, ("tcp",), max_tokens=2**20, vocab_size=100)
    many = few.model_copy(update={"token_ids": (1,) * 2**17})
    assert offer.rejection_reason(few) is None
    assert "exceed the limit" in str(offer.rejection_reason(many))
    assert "token id 100" in str(offer.rejection_reason(few.model_copy(update={"last_token_id": 100})))


@pytest.mark.parametrize("end", ["admitted", "aborted", "failed"])
def test_an_entry_that_ends_says_nothing_of_its_chunks_any_more(end: str) -> None:
    h = World.sending()
    h.sent(checksums=True)
    assert len(h.control.repeated) == 1
    match end:
        case "admitted":
            h.sent(checksums=True)
            h.receive(Admitted(attempt=R))
        case "aborted":
            h.receive(Abort(attempt=R))
            h.sent(checksums=True)
            assert h.control.take(Quiesced) == [Quiesced(attempt=R)], "and nothing of what landed after the abort"
        case "failed":
            h.sent(error="the peer is gone")
    assert len(h.held) == 0
    assert not h.control.repeated
    h.receive(ChunkTaken(attempt=R, number=0))


def test_only_its_own_decode_node_answers_for_a_chunk() -> None:
    h = World()
    h.receive(request())
    h.compute()
    h.sent(checksums=True)
    other = Peer(role="decode", address="127.0.0.1:2", boot_id="second")
    h.receive(ChunkTaken(attempt=R, number=0), sender=other)
    h.receive(ChunkTaken(attempt=R._replace(epoch=2), number=0))
    h.receive(ChunkTaken(attempt=R, number=1))
    assert list(h.control.repeated.values()) == [(DECODE, chunk_done(0, 0, 6))]
