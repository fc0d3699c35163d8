"""How failed handshakes are counted."""

from control.access import HANDSHAKE_S, Handshakes

LATER = HANDSHAKE_S + 2


def test_the_count_never_goes_back() -> None:
    """A handshake that was decided early is counted as under way until its time is over."""
    handshakes = Handshakes()
    handshakes.accepted(100.0)
    handshakes.settle(100.0 + LATER)
    handshakes.accepted(100.0 + LATER)
    handshakes.decided()
    handshakes.settle(100.0 + LATER)
    assert handshakes.failed == 1
    handshakes.settle(100.0 + 2 * LATER)
    assert handshakes.failed == 1
