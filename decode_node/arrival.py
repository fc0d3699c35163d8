"""What has arrived of a prompt, as far as its prefill node has said so, and how much of it was verified."""

from enum import Enum

from control.messages import ChunkDone, PrefillDone

Part = int | None
"""What has checksums of its own: a chunk, by its number, or None for what comes with PrefillDone."""


class Stage(Enum):
    """How far the arrival of a prompt is. Each stage follows the one before it, or the attempt fails."""

    COMING = "coming"
    """The prefill node has something to say yet, or to say again."""
    VERIFYING = "verifying"
    """It has said everything: from now on nothing depends on it any more."""
    VERIFIED = "verified"
    """All of it is what was sent."""


def part_of(message: ChunkDone | PrefillDone) -> Part:
    return message.number if isinstance(message, ChunkDone) else None


class Arrival:
    """Owns which parts of an attempt are expected, which the verifier has taken and which it has found to hold.

    Parts come in any order. PrefillDone says how many to expect. There is no state for a part that does not hold: it
    ends the attempt, and this with it.
    """

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: of the prompt."""
        self._num_tokens = num_tokens
        self._taken: set[Part] = set()
        self._verified: set[Part] = set()
        self.done: PrefillDone | None = None
        """What the node said when all had landed, once that was taken."""
        self.num_checksums = 0
        """In all parts that were taken."""

    @property
    def stage(self) -> Stage:
        if self.done is None or len(self._taken) < self.done.chunks + 1:
            return Stage.COMING
        return Stage.VERIFYING if len(self._verified) < len(self._taken) else Stage.VERIFIED

    def has(self, part: Part) -> bool:
        """Whether it was taken, and is verified at most once."""
        return part in self._taken

    def contradiction(self, message: ChunkDone | PrefillDone) -> str | None:
        """Why what the node says cannot be, after what it was asked for and what it said before, or None."""
        if isinstance(message, ChunkDone):
            return _beyond(message.number, self._num_tokens - 1 if self.done is None else self.done.chunks)
        if message.num_tokens != self._num_tokens:
            return f"prefill covered {message.num_tokens} tokens, not {self._num_tokens}"
        if message.chunks >= self._num_tokens:
            return f"{message.chunks} chunks before the last one, in {self._num_tokens} tokens"
        return _beyond(max((part for part in self._taken if part is not None), default=-1), message.chunks)

    def take(self, message: ChunkDone | PrefillDone) -> None:
        """The verifier has its checksums; where there are none, nothing is to be verified. Once for each part."""
        part = part_of(message)
        self._taken.add(part)
        self.num_checksums += len(message.checksums)
        if isinstance(message, PrefillDone):
            self.done = message
        if not message.checksums:
            self._verified.add(part)

    def verified(self, part: Part) -> None:
        """The checksums of a part hold. Raises RuntimeError if it was never taken."""
        if part not in self._taken:
            raise RuntimeError(f"part {part} was verified and never taken")
        self._verified.add(part)


def _beyond(number: int, chunks: int) -> str | None:
    return f"chunk {number} landed, of {chunks} that there can be" if number >= chunks else None
