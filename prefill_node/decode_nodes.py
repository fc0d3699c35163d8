"""The decode nodes that a prefill node serves, and whether they are alive."""

import time
from collections.abc import Iterable

from control.messages import Peer
from control.plane import ControlPlane

_WATCHED_FOR_S = 60.0
_SILENT_AFTER_S = 10.0


class DecodeNodes:
    """Pings the decode nodes that have attempts here: nothing is posted to one that does not answer. One loop calls it.

    Pings go on for a while afterwards, so that the next attempt need not wait for an answer.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._served_at: dict[Peer, float] = {}
        """When each last had an attempt here (time.monotonic)."""

    def watch(self, served: Iterable[Peer]) -> None:
        """These decode nodes have attempts here."""
        now = time.monotonic()
        self._served_at |= dict.fromkeys(served, now)
        self._served_at = {decode: at for decode, at in self._served_at.items() if now - at < _WATCHED_FOR_S}
        self._control.watch(self._served_at)

    def is_silent(self, decode: Peer, now: float) -> bool:
        """Whether the decode node was silent for so long that it will not ask for its attempts any more."""
        return now - (self._control.last_heard(decode.boot_id) or 0.0) > _SILENT_AFTER_S
