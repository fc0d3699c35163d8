"""What a prefill node says of what is over, again and again, since each answer may be lost."""

from control.messages import NotHeld, Peer, Quiesced
from prefill_node.entry import Key
from prefill_node.over import Over

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")
KEY: Key = ("decode", "r", 1)


def test_what_is_over_is_remembered() -> None:
    over = Over()
    assert KEY not in over
    over.add(KEY)
    assert KEY in over
    assert ("another decode node", "r", 1) not in over
    assert ("decode", "r", 2) not in over


def test_what_lingers_is_said_in_every_answer_and_need_not_be_over() -> None:
    over = Over()
    assert not over.quiesced(KEY).lingering
    over.note_lingering(KEY)
    assert KEY not in over
    for _ in range(2):
        assert over.quiesced(KEY) == Quiesced(request_id="r", epoch=1, lingering=True)
        failed = over.failed(KEY, "a write failed", in_flight=True, leaving=False)
        assert (failed.lingering, failed.in_flight, failed.leaving) == (True, True, False)


def test_what_lingers_is_not_called_not_held_which_is_as_good_as_quiet() -> None:
    over = Over()
    over.note_lingering(KEY)
    assert over.not_held(DECODE, [("q", 3), ("r", 1), ("r", 2)]) == [
        Quiesced(request_id="r", epoch=1, lingering=True),
        NotHeld(keys=(("q", 3), ("r", 2))),
    ]
    assert over.not_held(DECODE, [("r", 1)]) == [Quiesced(request_id="r", epoch=1, lingering=True)]
    assert over.not_held(DECODE, []) == []


def test_what_lingers_for_one_decode_node_does_not_for_another_with_a_request_of_that_name() -> None:
    over = Over()
    over.note_lingering(KEY)
    other = DECODE.model_copy(update={"boot_id": "other"})
    assert over.not_held(other, [("r", 1)]) == [NotHeld(keys=(("r", 1),))]
