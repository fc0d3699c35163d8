"""What a prefill node says of finished attempts, again and again, since each answer may be lost."""

from control.messages import AttemptId, NotHeld, Quiesced
from prefill_node.endpoint import FinishedAttempts

R = AttemptId("decode", "r", 1)


def test_a_finished_attempt_is_remembered() -> None:
    finished = FinishedAttempts()
    assert R not in finished
    finished.add(R)
    assert R in finished
    assert R._replace(decode="another decode node") not in finished
    assert R._replace(epoch=2) not in finished


def test_what_lingers_is_said_in_every_answer() -> None:
    finished = FinishedAttempts()
    assert not finished.quiesced(R).lingering
    finished.add(R, lingering=True)
    for _ in range(2):
        assert finished.quiesced(R) == Quiesced(attempt=R, lingering=True)


def test_what_lingers_is_not_called_not_held_which_is_as_good_as_quiet() -> None:
    finished = FinishedAttempts()
    finished.add(R, lingering=True)
    others = (R._replace(request_id="q"), R._replace(epoch=2), R._replace(decode="another decode node"))
    assert finished.not_held([others[0], R, *others[1:]]) == [
        Quiesced(attempt=R, lingering=True),
        NotHeld(attempts=others),
    ]
    assert finished.not_held([R]) == [Quiesced(attempt=R, lingering=True)]
    assert finished.not_held([]) == []
