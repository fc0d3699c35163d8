"""Remembers finished attempts, so that a delayed duplicate gets the same answer."""

from collections.abc import Sequence

from base.tombstones import Tombstones
from control.messages import AttemptId, NotHeld, Quiesced


class FinishedAttempts:
    """Attempts of which nothing is in flight, and those whose writes may linger in the network. One loop calls it.

    Every answer repeats that writes may linger, since each answer may be lost.
    """

    def __init__(self) -> None:
        self._attempts: Tombstones[AttemptId] = Tombstones()
        self._lingering: Tombstones[AttemptId] = Tombstones()

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._attempts

    def add(self, attempt: AttemptId, lingering: bool = False) -> None:
        self._attempts.add(attempt)
        if lingering:
            self.note_lingering(attempt)

    def note_lingering(self, attempt: AttemptId) -> None:
        """A write was cut or given up, and may still land, even if it was repeated. The attempt may go on."""
        self._lingering.add(attempt)

    def quiesced(self, attempt: AttemptId) -> Quiesced:
        """The answer to a message that would stop a finished attempt, or start it again."""
        return Quiesced(attempt=attempt, lingering=attempt in self._lingering)

    def not_held(self, attempts: Sequence[AttemptId]) -> list[Quiesced | NotHeld]:
        """The answer to a question about attempts that the engine does not hold."""
        lingering = [attempt for attempt in attempts if attempt in self._lingering]
        answers: list[Quiesced | NotHeld] = [self.quiesced(attempt) for attempt in lingering]
        if quiet := tuple(attempt for attempt in attempts if attempt not in self._lingering):
            answers.append(NotHeld(attempts=quiet))
        return answers
