"""The decode nodes that a prefill node works for, and whether they live."""

import time
from collections.abc import Iterable

from control.messages import Peer
from control.plane import ControlPlane

_WATCHED_FOR_S = 60.0
_SILENT_AFTER_S = 10.0


class DecodeNodes:
    """Owns which decode nodes are asked for signs of life: nothing is posted to one that gives none.

    Those that have something here, and for a while those that had: they will probably come back, and their next prompt
    would wait for an answer. One loop calls it.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._served_at: dict[Peer, float] = {}
        """When each had something here (time.monotonic), of those that had lately."""

    def watch(self, served: Iterable[Peer]) -> None:
        """These have something here."""
        now = time.monotonic()
        self._served_at |= dict.fromkeys(served, now)
        self._served_at = {decode: at for decode, at in self._served_at.items() if now - at < _WATCHED_FOR_S}
        self._control.watch(self._served_at)

    def is_silent(self, decode: Peer, now: float) -> bool:
        """Whether a decode node was not heard for so long that nobody will ask for what it left here."""
        return now - (self._control.last_heard(decode.boot_id) or 0.0) > _SILENT_AFTER_S
