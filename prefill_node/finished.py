"""Remembers finished attempts, so that a delayed duplicate gets the same answer."""

from collections.abc import Sequence

from base.tombstones import Tombstones
from control.messages import AttemptId, NotHeld, Quiesced


class FinishedAttempts:
    """Attempts of which nothing is in flight here and nothing will be, and those of which something may linger.

    That something lingers is repeated in every answer, since each may be lost. One loop calls it.
    """

    def __init__(self) -> None:
        self._attempts: Tombstones[AttemptId] = Tombstones()
        self._lingering: Tombstones[AttemptId] = Tombstones()

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._attempts

    def add(self, attempt: AttemptId, lingering: bool = False) -> None:
        """It is over. lingering: see `note_lingering`."""
        self._attempts.add(attempt)
        if lingering:
            self.note_lingering(attempt)

    def note_lingering(self, attempt: AttemptId) -> None:
        """A write of it was cut or given up, and the network may still carry it, also if it was repeated and landed.

        The attempt need not be over yet.
        """
        self._lingering.add(attempt)

    def lingers(self, attempt: AttemptId) -> bool:
        return attempt in self._lingering

    def quiesced(self, attempt: AttemptId) -> Quiesced:
        """The answer to whoever wants a finished attempt stopped, or begun again."""
        return Quiesced(attempt=attempt, lingering=self.lingers(attempt))

    def not_held(self, attempts: Sequence[AttemptId]) -> list[Quiesced | NotHeld]:
        """The answer to a question about attempts of which nothing is here."""
        answers: list[Quiesced | NotHeld] = [self.quiesced(attempt) for attempt in attempts if self.lingers(attempt)]
        if quiet := tuple(attempt for attempt in attempts if not self.lingers(attempt)):
            answers.append(NotHeld(attempts=quiet))
        return answers
