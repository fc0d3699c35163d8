"""Log probabilities of a prompt's tokens from position 1 on, in messages and in the table that collects them."""

from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from base.wire import WireModel

MAX_PROMPT_LOGPROBS = 2**18
"""Log probabilities of one request: each token's own and its alternatives'. They take 8 bytes each, and some 60 in an
answer."""
_IN_PIECE = 2**15
"""Log probabilities of one piece at most, unless one token has more: 256 KiB."""
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")

Alternatives = Annotated[int, Field(ge=0, le=20)]
"""How many of the likeliest tokens are reported with each token."""
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


def too_many(num_tokens: int, alternatives: int) -> str | None:
    """Why the log probabilities of a prompt are not given, or None."""
    count = num_tokens * (1 + alternatives)
    if count <= MAX_PROMPT_LOGPROBS:
        return None
    return (
        f"{count} log probabilities ({num_tokens} tokens, each with {alternatives} alternatives) exceed the limit of "
        f"{MAX_PROMPT_LOGPROBS}"
    )


class PromptLogprobs(WireModel):
    """Log probabilities of consecutive positions from `start` on, row by row, little-endian.

    ints: int32 [rows, 1 + alternatives], the rank of the position's token (1: the likeliest) and the ids of the
    likeliest tokens. floats: float32 of the same shape, the token's log probability and theirs.
    """

    start: Annotated[int, Field(ge=1, lt=2**31)]
    alternatives: Alternatives
    ints: bytes
    floats: bytes

    @classmethod
    def of(cls, start: int, ints: Int32s, floats: Float32s) -> Self:
        """ints, floats: [rows, 1 + alternatives]."""
        packed = ints.astype(_INT).tobytes(), floats.astype(_FLOAT).tobytes()
        return cls(start=start, alternatives=ints.shape[1] - 1, ints=packed[0], floats=packed[1])

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.ints) != len(self.floats) or len(self.ints) % (4 * (1 + self.alternatives)):
            raise ValueError("the columns are not of whole rows, or differ in length")
        return self

    @property
    def stop(self) -> int:
        return self.start + len(self.ints) // (4 * (1 + self.alternatives))


class PromptLogprobTable:
    """The log probabilities of one prompt, as they arrive. ints, floats: as in PromptLogprobs, from position 1 on."""

    def __init__(self, num_tokens: int, alternatives: int) -> None:
        """num_tokens: of the whole prompt."""
        self.ints: Int32s = np.zeros((num_tokens - 1, 1 + alternatives), dtype=np.int32)
        self.floats: Float32s = np.zeros((num_tokens - 1, 1 + alternatives), dtype=np.float32)
        self._has = np.zeros(num_tokens - 1, dtype=np.bool_)

    @property
    def complete(self) -> bool:
        return bool(self._has.all())

    def rejection_reason(self, piece: PromptLogprobs) -> str | None:
        """Why a piece cannot be taken, or None."""
        rows, width = self.ints.shape
        if piece.alternatives != width - 1:
            return f"log probabilities with {piece.alternatives} alternatives, not {width - 1}"
        if piece.stop > rows + 1:
            return f"log probabilities up to position {piece.stop - 1}, of a prompt of {rows + 1} tokens"
        if not np.isfinite(np.frombuffer(piece.floats, _FLOAT)).all():
            return "the model's logits are not finite numbers"
        return None

    def add(self, piece: PromptLogprobs) -> None:
        """Add a piece without a `rejection_reason`. Idempotent."""
        rows = slice(piece.start - 1, piece.stop - 1)
        self.ints[rows] = np.frombuffer(piece.ints, _INT).reshape(-1, self.ints.shape[1])
        self.floats[rows] = np.frombuffer(piece.floats, _FLOAT).reshape(-1, self.ints.shape[1])
        self._has[rows] = True

    def pieces(self) -> Iterator[PromptLogprobs]:
        """The complete table, in pieces of bounded size."""
        count, width = self.ints.shape
        every = max(1, _IN_PIECE // width)
        for first in range(0, count, every):
            rows = slice(first, first + every)
            yield PromptLogprobs.of(first + 1, self.ints[rows], self.floats[rows])
