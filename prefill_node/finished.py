"""Remembers finished attempts, so that a delayed duplicate gets the same answer."""

from collections import OrderedDict
from collections.abc import Sequence

from base.tombstones import remember
from control.messages import AttemptId, NotHeld, Quiesced

_LIMIT = 65536


class FinishedAttempts:
    """Attempts of which nothing is in flight, and whether their writes may linger in the network. One loop calls it.

    Every answer repeats that writes may linger, since each answer may be lost.
    """

    def __init__(self) -> None:
        self._lingering: OrderedDict[AttemptId, bool] = OrderedDict()

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._lingering

    def add(self, attempt: AttemptId, lingering: bool = False) -> None:
        remember(self._lingering, attempt, lingering or self._lingers(attempt), _LIMIT)

    def quiesced(self, attempt: AttemptId) -> Quiesced:
        """The answer to a message that would stop a finished attempt, or start it again."""
        return Quiesced(attempt=attempt, lingering=self._lingers(attempt))

    def not_held(self, attempts: Sequence[AttemptId]) -> list[Quiesced | NotHeld]:
        """The answer to a question about attempts that the node does not hold."""
        answers: list[Quiesced | NotHeld] = [self.quiesced(attempt) for attempt in attempts if self._lingers(attempt)]
        if quiet := tuple(attempt for attempt in attempts if not self._lingers(attempt)):
            answers.append(NotHeld(attempts=quiet))
        return answers

    def _lingers(self, attempt: AttemptId) -> bool:
        return self._lingering.get(attempt, False)
