"""How many drafts a step verifies: what gives the most tokens per second, by measurement.

A step with drafts takes longer and gives more tokens. Both depend on the batch: of few requests a step mostly reads
weights, which more tokens do not make slower, while of many it computes. So the policy measures, for each size of a
batch, how long steps of each width take, and how many drafts are accepted.
"""

from collections import defaultdict
from dataclasses import dataclass

_WIDTHS = (1, 2, 4)
"""Those that are recorded and tried: 1 is no drafts."""
_TRY_EVERY = 256
"""Steps of a batch size from one trial of another width to the next. A trial costs at most a percent."""
_TRIAL = 4
"""Steps of a trial. The first has the drafts of the step before, which may be fewer."""
_SMOOTHING = 0.2
_DECAY = 0.98


@dataclass(frozen=True)
class StepSize:
    """Requests of a step, and how many tokens of each it computes at most. All ranks of a group use the largest."""

    batch: int
    width: int

    @property
    def packed(self) -> int:
        """As one number, 0 without requests. Of two, the one with more requests is larger."""
        return self.batch * (_WIDTHS[-1] + 1) + self.width if self.batch else 0

    @classmethod
    def unpack(cls, packed: int) -> "StepSize":
        return cls(*divmod(packed, _WIDTHS[-1] + 1))


class DraftPolicy:
    """The width of each step. This one is always the same: as many drafts as configured."""

    def __init__(self, max_drafts: int) -> None:
        self.max_width = 1 + max_drafts

    def widths(self, batch: int) -> tuple[int, ...]:
        """Those that steps of a batch may have, ascending."""
        return (self.max_width,)

    def choose(self, batch: int) -> int:
        """The width of the next step."""
        return self.max_width

    def note_time(self, size: StepSize, seconds: float) -> None:
        """A step took that long, from the end of the one before it."""

    def note_drafts(self, drafted: int, accepted: int) -> None:
        """Of so many drafts of a request the first `accepted` were right."""


class MeasuredDrafts(DraftPolicy):
    """As many drafts as are measured to give the most tokens per second."""

    def __init__(self, max_drafts: int = _WIDTHS[-1] - 1) -> None:
        super().__init__(max_drafts)
        self._seconds: dict[StepSize, float] = {}
        """Of a step of each size that was measured; batches are powers of two."""
        self._steps: defaultdict[int, int] = defaultdict(int)
        """Steps of each size of a batch so far."""
        self._trial: dict[int, tuple[int, int]] = {}
        """By size of a batch: the width that is tried, and how many more steps of it."""
        # One draft in two, until more is known.
        self._reached, self._right = [2.0] * max_drafts, [1.0] * max_drafts

    def widths(self, batch: int) -> tuple[int, ...]:
        return tuple(width for width in _WIDTHS if width <= self.max_width)

    def choose(self, batch: int) -> int:
        size = _rounded(batch)
        width, left = self._trial.pop(size, (0, 0))
        if not left:
            width, left = self._next(batch, size)
        if left > 1:
            self._trial[size] = width, left - 1
        return width

    def note_time(self, size: StepSize, seconds: float) -> None:
        key = StepSize(_rounded(size.batch), size.width)
        known = self._seconds.get(key, seconds)
        # A pause is not the step's.
        self._seconds[key] = known + _SMOOTHING * (min(seconds, 2 * known) - known)

    def note_drafts(self, drafted: int, accepted: int) -> None:
        for place in range(min(drafted, accepted + 1)):
            self._reached[place] = _DECAY * self._reached[place] + 1
            self._right[place] = _DECAY * self._right[place] + (place < accepted)

    def tokens(self, width: int) -> float:
        """How many tokens of a request a step of that width gives, on average."""
        total, probability = 1.0, 1.0
        for right, reached in zip(self._right[: width - 1], self._reached, strict=False):
            probability *= right / reached
            total += probability
        return total

    def _next(self, batch: int, size: int) -> tuple[int, int]:
        """A width, and for how many steps: one that was never measured, at times another one, else the best."""
        self._steps[size] += 1
        widths = self.widths(batch)
        for width in widths:
            if StepSize(size, width) not in self._seconds:
                return width, _TRIAL
        best = max(widths, key=lambda width: self.tokens(width) / self._seconds[StepSize(size, width)])
        others = [width for width in widths if width != best]
        number, is_due = divmod(self._steps[size], _TRY_EVERY)
        if others and not is_due:
            return others[number % len(others)], _TRIAL
        return best, 1


def policy_of(steps: str, max_drafts: int) -> DraftPolicy:
    """steps: the flag `--speculative-num-steps`. max_drafts: 0 without a draft layer."""
    return MeasuredDrafts(max_drafts) if steps == "auto" and max_drafts else DraftPolicy(max_drafts)


def _rounded(batch: int) -> int:
    """The next power of two: as steps are recorded."""
    return 1 << (batch - 1).bit_length()
