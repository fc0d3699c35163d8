"""What is asked of the service."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

import numpy as np

from base.errors import StartupError
from benchmarks.passkey.text import passage_ids
from benchmarks.serving.answer import is_token_id


@dataclass(frozen=True)
class Prompt:
    """A text or its token ids, and how many tokens the answer shall have."""

    content: str | list[int]
    output_tokens: int

    @property
    def input_tokens(self) -> int | None:
        """None for a text: only the service knows."""
        return None if isinstance(self.content, str) else len(self.content)

    @property
    def turns(self) -> Sequence["Prompt"]:
        """A prompt is a session of one turn."""
        return (self,)

    def after(self, before: "Prompt", answer: Sequence[int] = ()) -> "Prompt":
        """The same behind another prompt and the answer to it. Raises ValueError for texts, which have no token ids."""
        if isinstance(self.content, str) or isinstance(before.content, str):
            raise ValueError("a prompt goes behind another one as token ids, not as a text")
        return Prompt([*before.content, *answer, *self.content], self.output_tokens)


class Session(Protocol):
    """What one client asks, turn by turn: the tokens that each turn adds to all that was said before it."""

    @property
    def turns(self) -> Sequence[Prompt]: ...


class Workload(Protocol):
    """Where prompts come from."""

    def draw(self, point: int, count: int, ahead: int = 0) -> Iterator[Session]:
        """For the load point of this number, `ahead` sessions that do not count, and then `count` that do.

        The same ones each time that it is asked for.
        """
        ...

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its answer can have together, as far as that is known."""
        ...


@dataclass(frozen=True)
class RandomPrompts:
    """Token ids drawn evenly from 0 to `vocab_size` - 1, so that no two prompts share a prefix worth caching.

    Lengths, of prompts and of answers, are drawn evenly from (1 - range_ratio) to (1 + range_ratio) times the given
    ones, as in vLLM. Load points have different prompts: no answer comes from an earlier one's cache.
    """

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    vocab_size: int = 256
    seed: int = 0

    def draw(self, point: int, count: int, ahead: int = 0) -> Iterator[Prompt]:
        rng = np.random.default_rng((self.seed, point))
        for _ in range(ahead + count):
            content = self._content(rng, self._length(rng, self.input_tokens))
            yield Prompt(content, output_tokens=self._length(rng, self.output_tokens))

    @property
    def longest(self) -> int:
        return sum(self._bounds(tokens)[1] for tokens in (self.input_tokens, self.output_tokens))

    def _content(self, rng: np.random.Generator, length: int) -> list[int]:
        ids: list[int] = rng.integers(0, self.vocab_size, length).tolist()
        return ids

    def _length(self, rng: np.random.Generator, tokens: int) -> int:
        least, most = self._bounds(tokens)
        return int(rng.integers(least, most + 1))

    def _bounds(self, tokens: int) -> tuple[int, int]:
        return max(1, round(tokens * (1 - self.range_ratio))), max(1, round(tokens * (1 + self.range_ratio)))


@dataclass(frozen=True)
class TextPrompts(RandomPrompts):
    """The same lengths of English for `benchmarks.passkey`'s model: each prompt a passage that begins anywhere."""

    def _content(self, rng: np.random.Generator, length: int) -> list[int]:
        return passage_ids(random.Random(int(rng.integers(1 << 32))), length)


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts in the order of a file, again and again; every load point begins with the first.

    A service that caches prefixes will have seen the later ones.
    """

    prompts: Sequence[Prompt]

    def draw(self, point: int, count: int, ahead: int = 0) -> Iterator[Prompt]:
        return islice(cycle(self.prompts), ahead + count)

    @property
    def longest(self) -> int:
        return max((prompt.input_tokens or 0) + prompt.output_tokens for prompt in self.prompts)


def read_prompts(path: Path, output_tokens: int) -> GivenPrompts:
    """Prompts of a JSONL file: `prompt`, a text or token ids, and optionally `output_tokens`, in each line.

    Raises StartupError, naming the line, for anything else.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--prompts {path}: {error}") from error
    prompts = [_prompt(path, number, line, output_tokens) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise StartupError(f"--prompts {path}: expected at least one prompt, found none")
    return GivenPrompts(prompts)


def _prompt(path: Path, number: int, line: str, output_tokens: int) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if isinstance(entry, dict):
        content, tokens = entry.get("prompt"), entry.get("output_tokens", output_tokens)
        is_ids = isinstance(content, list) and all(map(is_token_id, content))
        if content and (isinstance(content, str) or is_ids) and type(tokens) is int and tokens >= 1:
            return Prompt(content, tokens)
    raise StartupError(
        f'--prompts {path}, line {number}: expected {{"prompt": TEXT or [TOKEN IDS], "output_tokens": N (optional)}}, '
        f"found {line[:60]}"
    )
