"""Reading a text that comes in pieces: steps that wait for more in the middle."""

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""A step: yields where it needs more text, returns what it has read."""

_SPACE = re.compile(r"\s*")
_LONGEST_WORD = 256


class Malformed(Exception):
    """The text cannot be what was expected, whatever follows."""


class PieceReader:
    """A text and a place in it. Each step decides as soon as the text is certain, however that is cut into pieces.

    Steps raise Malformed where the text ceases to be what they expect, or at the end of the text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        """Where in `_text` the next step reads."""
        self._taken: list[str] = []
        """What was read. The owner empties it."""
        self._finished = False
        """Whether no more text comes."""

    def _add(self, text: str) -> None:
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def _take(self, length: int) -> str:
        taken = self._text[self._pos : self._pos + length]
        self._pos += length
        self._taken.append(taken)
        return taken

    def _more(self) -> Steps[None]:
        if self._finished:
            raise Malformed
        yield

    def _literal(self, *alternatives: str) -> Steps[str]:
        """Take one of the alternatives, none of which begins another."""
        while True:
            for alternative in alternatives:
                if self._text.startswith(alternative, self._pos):
                    return self._take(len(alternative))
            rest = self._text[self._pos : self._pos + max(map(len, alternatives))]
            if not any(alternative.startswith(rest) for alternative in alternatives):
                raise Malformed
            yield from self._more()

    def _spaced(self, *alternatives: str) -> Steps[str]:
        """Take white space, which means nothing between markers, and one of the alternatives."""
        while True:
            space = _SPACE.match(self._text, self._pos)
            self._take(space.end() - self._pos if space else 0)
            if self._pos < len(self._text):
                return (yield from self._literal(*alternatives))
            yield from self._more()

    def _until(self, end: str, give: Callable[[str], None]) -> Steps[None]:
        """Hand over text up to the marker `end`, and take that, too. Raises Malformed if the answer ends before it."""
        while True:
            at = self._text.find(end, self._pos)
            stop = at if at >= 0 else len(self._text)
            if at < 0 and not self._finished:
                stop -= overlap(self._text, self._pos, end)
            if stop > self._pos:
                give(self._take(stop - self._pos))
            if at >= 0:
                self._take(len(end))
                return
            yield from self._more()

    def _word(self, stop: str) -> Steps[str]:
        """Take 1 to 256 characters of a line, up to the character `stop`."""
        while True:
            end = self._text.find(stop, self._pos)
            word = self._text[self._pos : end if end >= 0 else len(self._text)]
            if len(word) > _LONGEST_WORD or "\n" in word or end == self._pos:
                raise Malformed
            if end >= 0:
                return self._take(len(word))
            yield from self._more()


def overlap(text: str, start: int, marker: str) -> int:
    """How many characters at the end of text[start:] may be the beginning of the marker."""
    at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0
