"""A long text with pass keys in it, the question for one of them, and whether an answer is right.

After Mohtashami and Jaggi, "Landmark Attention" (arXiv:2305.16300), with several keys as in RULER's "multi-key" task
(Hsieh et al., arXiv:2404.06654). The wording is one that the model was trained on.
"""

import random
import re
from dataclasses import dataclass

from benchmarks.passkey.text import passage

KEYS = 4
"""Pass keys in a text, one of which is asked for."""

_NOUNS = """
river mountain garden window bottle candle forest harbour island kitchen ladder mirror needle orange pencil rabbit
saddle table umbrella valley wagon basket bridge castle desert engine feather guitar hammer jacket
"""
WORDS = tuple(_NOUNS.split())


@dataclass(frozen=True)
class Question:
    """text: ASCII. place: where in it the sentence with the key of `word` begins."""

    text: str
    word: str
    key: str
    place: int

    @property
    def words(self) -> str:
        return f"What is the pass key of {self.word}?"

    @property
    def prompt(self) -> str:
        """For a completion, which begins with the key."""
        return f"{BEGIN}{self.text}{self._tail}"

    @property
    def message(self) -> str:
        """For a conversation: the user's."""
        return f"{self.text}\n{self.words}"

    @property
    def _tail(self) -> str:
        return f"\nQuestion: {self.words} Answer: "

    def is_answered_by(self, answer: str) -> bool:
        """Whether the first number in the answer is the key."""
        found = re.search(r"\d+", answer)
        return found is not None and found.group() == self.key


BEGIN = "<|begin|>"
"""A token that says that what follows is a text of its own."""


def sentence(word: str, key: str) -> str:
    return f"The pass key of {word} is {key}."


def make_question(seed: str, length: int, depth: float | None = None) -> Question:
    """A question whose completion prompt has exactly `length` tokens of the model: BEGIN and bytes.

    depth: where the key lies, from 0 at the beginning to 1 at the end; None: anywhere. The same seed gives the same
    question. Raises ValueError for lengths that are too short for the sentences, or longer than half of all text.
    """
    rng = random.Random(seed)
    words = rng.sample(WORDS, KEYS)
    keys = [str(rng.randrange(10_000, 100_000)) for _ in words]
    lines = [sentence(word, key) + "\n" for word, key in zip(words, keys, strict=True)]
    asked, asked_key = words[0], keys[0]
    rest = length - len("".join(lines)) - len(Question("", asked, asked_key, 0)._tail) - 1
    if rest < 0:
        raise ValueError(
            f"a text with {KEYS} pass keys and a question has at least {length - rest} tokens, not {length}"
        )
    text = passage(rng, rest)
    # Between lines; those of one place follow each other.
    ends = [0, *(found.end() for found in re.finditer("\n", text))]
    depths = [rng.random() if depth is None else depth, *(rng.random() for _ in words[1:])]
    places = [min(ends, key=lambda end, wanted=wanted * rest: abs(end - wanted)) for wanted in depths]  # type: ignore[misc]
    for place, line in sorted(zip(places, lines, strict=True), reverse=True):
        text = text[:place] + line + text[place:]
    return Question(text, asked, asked_key, text.index(lines[0]))
