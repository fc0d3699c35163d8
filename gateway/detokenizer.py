"""From token ids to text, a piece at a time: the detokenizer and the stop-string matcher."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_WINDOW = 16
"""Tokens decoded together before the window moves on; twice as many where the text at its end stays uncertain."""
_OVERLAP = 6
"""Tokens kept when it moves: enough to give the next token its context (a leading space, a split character)."""
_CHARACTER = 4
"""Bytes of the longest character, and so the number of tokens that it may be spread over."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text deltas whose concatenation is what decoding all tokens at once gives.

    A token may end inside a character, and some tokenizers drop the space before the first token that they decode, so
    single tokens cannot be decoded alone. A sliding window of the last tokens is decoded instead (after the prefix
    windows of text-generation-inference and vLLM), and text is given out once no further token can change it. What a
    token costs is bounded by the window, whatever the tokens are.
    """

    def __init__(self, decode: Decode, skips: Callable[[int], bool]) -> None:
        """`skips` says which ids `decode` leaves out: however many come, they take no place in the window."""
        self._decode = decode
        self._skips = skips
        self._window: list[int] = []
        self._text = ""
        """The window, decoded."""
        self._given = 0
        """How much of `_text` has been given out."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        if self._skips(token_id):
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        # What ends in replacement characters may be the beginning of a longer character.
        delta = self._give(len(self._text.rstrip(_INCOMPLETE)))
        certain = self._given == len(self._text)
        if len(self._window) > (_WINDOW if certain else 2 * _WINDOW):
            delta += self._advance()
        return delta

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        delta = self._text[self._given : end]
        self._given = max(self._given, end)
        return delta

    def _advance(self) -> str:
        """Drop old tokens; returns text that was still held back and is not in doubt any more.

        What is kept holds the last character whole, so what follows decodes after it as after everything. Its own
        beginning may lack a space or the first half of a character: that is given out already.
        """
        cut = len(self._window) - _OVERLAP
        for _ in range(_CHARACTER):
            kept = self._decode(self._window[cut:])
            if kept[-1:] == self._text[-1:]:
                break
            # Some tokenizers let a character that was cut in two spoil those that follow it.
            cut -= 1
        else:
            if len(self._window) <= 2 * _WINDOW:
                return ""
        unfinished = 1 if self._text.endswith(_INCOMPLETE) else 0
        delta = self._give(len(self._text) - unfinished)
        self._window, self._text, self._given = self._window[cut:], kept, max(0, len(kept) - unfinished)
        return delta


class StopMatcher:
    """Cuts text before the stop string that is completed first; of two completed together, before the longer one.

    The outcome does not depend on how the text arrives. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is certainly not part of a stop string."""
        if self.matched:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.matched = True
            return self._release(min(ends)[1], keep=False)
        return self._release(self._start_of_candidate())

    def finish(self) -> str:
        """What was held back, now that no text follows."""
        return self._release(len(self._held))

    def _start_of_candidate(self) -> int:
        longest = len(self._stops[0]) - 1 if self._stops else 0
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            suffix = self._held[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(self._held)

    def _release(self, end: int, keep: bool = True) -> str:
        released = self._held[:end]
        self._held = self._held[end:] if keep else ""
        return released
