"""Traces in Mooncake's format: one JSON object a line with the hashes of the 512-token blocks of a prompt.

Equal ids mean equal tokens, and all that is before them equal, too. The tokens themselves are not published: they are
made up here, so that blocks of 64 tokens are equal exactly if they are the same part of the same id.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError

TRACE_BLOCK_TOKENS = 512
VOCAB_SIZE = 2**17
MOST_IDS = VOCAB_SIZE**2
_PARTS = TRACE_BLOCK_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True)
class TracedPrompt:
    """input_length: tokens. hash_ids: int64 [ceil(input_length / 512)], each below MOST_IDS.

    timestamp: ms, when it was sent. output_length: tokens of its answer.
    """

    input_length: int
    hash_ids: npt.NDArray[np.int64]
    timestamp: float = 0.0
    output_length: int = 1

    def check(self) -> None:
        """Raises ValueError for numbers that a request cannot have."""
        if self.input_length < 1 or not math.isfinite(self.timestamp):
            raise ValueError(f"{self.input_length} tokens at {self.timestamp} ms")
        if self.hash_ids.ndim != 1 or not ((self.hash_ids >= 0) & (self.hash_ids < MOST_IDS)).all():
            raise ValueError(f"expected hash_ids from 0 to {MOST_IDS - 1}")

    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [input_length]. Each block of 64 begins with its id, in two tokens, and its number within the id."""
        ids = np.zeros((len(self.hash_ids), _PARTS, BLOCK_TOKENS), dtype=np.int32)
        ids[:, :, 0] = (self.hash_ids // VOCAB_SIZE)[:, None]
        ids[:, :, 1] = (self.hash_ids % VOCAB_SIZE)[:, None]
        ids[:, :, 2] = np.arange(_PARTS)
        return ids.reshape(-1)[: self.input_length]

    def blocks(self) -> list[int]:
        """A number for each whole block of 64 tokens, equal for equal blocks. Needs no tokens and no tree."""
        numbers = self.hash_ids[:, None] * _PARTS + np.arange(_PARTS)
        return list(numbers.reshape(-1)[: self.input_length // BLOCK_TOKENS].tolist())


def load_trace(path: Path) -> list[TracedPrompt]:
    """The prompts of a trace in their order. Without a timestamp a prompt is sent at 0, without an output_length it is
    answered by one token.

    Raises StartupError for a line that is no prompt, naming it.
    """
    prompts = []
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                prompt = TracedPrompt(
                    int(entry["input_length"]),
                    np.array(entry["hash_ids"], dtype=np.int64),
                    float(entry.get("timestamp", 0.0)),
                    int(entry.get("output_length", 1)),
                )
                prompt.check()
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise StartupError(f"{path}, line {number}: no request of a trace: {error!r}") from error
            if len(prompt.hash_ids) != -(-prompt.input_length // TRACE_BLOCK_TOKENS):
                raise StartupError(
                    f"{path}, line {number}: {len(prompt.hash_ids)} hash_ids for {prompt.input_length} tokens, "
                    f"expected one for each {TRACE_BLOCK_TOKENS}"
                )
            prompts.append(prompt)
    if not prompts:
        raise StartupError(f"{path}: no requests")
    return prompts
