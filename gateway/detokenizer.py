"""From token ids to text as they arrive: the detokenizers and the stop-string matcher."""

import codecs
from collections.abc import Callable, Collection, Sequence

_INCOMPLETE = "\ufffd"
_WINDOW = 16
"""Tokens decoded together before the window moves; twice as many while the text at its end is uncertain."""
_OVERLAP = 6
"""Tokens kept when the window moves, as context for the next token: a leading space, a split character."""
_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that a character is split over."""

Decode = Callable[[Sequence[int]], str]


class ByteDetokenizer:
    """Returns text deltas that together equal the text of all tokens decoded at once.

    For tokenizers whose text is their tokens' bytes, one after the other: the byte-level ones. Each token is decoded
    once, so this takes a fraction of the time that a window takes.
    """

    __slots__ = ("_bytes_of", "_rest", "_skipped")

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: Collection[int]) -> None:
        """skipped: ids that are not part of the text."""
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._rest = b""
        """The beginning of a character whose other bytes have not come."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        if token_id in self._skipped:
            return ""
        # As codecs' incremental decoder does it, in fewer steps.
        data = self._rest + self._bytes_of(token_id)
        text, decoded = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[decoded:]
        return text

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class WindowDetokenizer:
    """Returns text deltas that together equal the text of all tokens decoded at once, whatever the tokenizer.

    A token cannot be decoded alone: it may end inside a character, and some tokenizers drop the space before the first
    token. So a sliding window of the last tokens is decoded (after the prefix windows of text-generation-inference and
    vLLM), and text is returned once no further token can change it. The window bounds the cost of a token.
    """

    def __init__(self, decode: Decode, skips: Callable[[int], bool]) -> None:
        """skips: whether `decode` leaves an id out. Such ids take no place in the window."""
        self._decode = decode
        self._skips = skips
        self._window: list[int] = []
        self._text = ""
        """The window, decoded."""
        self._given = 0
        """Characters of `_text` that have been returned."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        if self._skips(token_id):
            return ""
        self._window.append(token_id)
        self._text = self._decode(self._window)
        # Replacement characters at the end may become a character with the next token.
        delta = self._give(len(self._text.rstrip(_INCOMPLETE)))
        certain = self._given == len(self._text)
        if len(self._window) > (_WINDOW if certain else 2 * _WINDOW):
            delta += self._advance()
        return delta

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        delta = self._text[self._given : end]
        self._given = max(self._given, end)
        return delta

    def _advance(self) -> str:
        """Drop old tokens. Returns text that was held back and is certain now.

        The tokens that stay hold the last character whole, so later tokens decode as they would after all tokens. The
        beginning of their text may lack a space or half a character, which has been returned already.
        """
        cut = len(self._window) - _OVERLAP
        for _ in range(_CHARACTER):
            kept = self._decode(self._window[cut:])
            if kept[-1:] == self._text[-1:]:
                break
            # With some tokenizers a character that is cut in two changes the characters behind it.
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

    Holds back text that may be the beginning of a stop string, so the result does not depend on how the text arrives.
    """

    __slots__ = ("_held", "_includes_stop", "_stops", "stop")

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        """includes_stop: the stop string is part of the text."""
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._includes_stop = includes_stop
        self._held = ""
        self.stop: str | None = None
        """The stop string that ended the text, once there is one."""

    def push(self, text: str, ends: bool = True) -> str:
        """The text that cannot be part of a stop string. ends: whether one that is complete ends the text."""
        if not self._stops:
            return text
        if self.stop is not None:
            return ""
        self._held += text
        if not ends:
            return self._release(self._start_of_candidate())
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            end, start, self.stop = min(found)
            released, self._held = self._held[: end if self._includes_stop else start], ""
            return released
        return self._release(self._start_of_candidate())

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        return self._release(len(self._held))

    def _start_of_candidate(self) -> int:
        longest = len(self._stops[0]) - 1 if self._stops else 0
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            suffix = self._held[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(self._held)

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released
