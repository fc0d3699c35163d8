"""From token ids to text as they arrive: tokens' bytes, detokenizers, stop strings, and the text of one answer."""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer, decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from control.messages import Output
from gateway.attempt import Delta, EndReason
from gateway.formats.reading import overlap

_INCOMPLETE = "\ufffd"
_WINDOW = 16
"""Tokens decoded together before the window moves; twice as many while the text at its end is uncertain."""
_OVERLAP = 6
"""Tokens kept when the window moves, as context for the next token: a leading space, a split character."""
_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that a character is split over."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How sentencepiece spells a single byte, for text that is not in its vocabulary."""


class TokenBytes:
    """The bytes of a tokenizer's tokens. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self.make_text = isinstance(decoder, decoders.ByteLevel)
        """Whether text is nothing but its tokens' bytes, one after the other."""
        is_byte_level = decoder is not None and decoder.decode(["\u0120"]) == " "
        # GPT-2's characters for bytes, which every byte-level tokenizer uses.
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if is_byte_level else {}
        self.of: Callable[[int], bytes] = lru_cache(tokenizer.get_vocab_size())(self._of)
        """The token's bytes, which may be part of a character; none of an id that the tokenizer does not know."""

    def _of(self, token_id: int) -> bytes:
        spelled = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._byte_of:
            # As the decoder has it: added tokens are spelled as they are, unless they look like bytes.
            is_bytes = all(character in self._byte_of for character in spelled)
            return bytes(self._byte_of[character] for character in spelled) if is_bytes else spelled.encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        if byte := _FALLBACK.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


@dataclass(eq=False, slots=True)
class ByteDetokenizer:
    """Text deltas that together equal the text of all tokens decoded at once: for tokenizers whose text is their bytes.

    Each token is decoded once, so this takes a fraction of the time that a window takes. skipped: ids that are not part
    of the text.
    """

    bytes_of: Callable[[int], bytes]
    skipped: Collection[int]
    _rest: bytes = field(init=False, default=b"")
    """The beginning of a character whose other bytes have not come."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        if token_id in self.skipped:
            return ""
        # As codecs' incremental decoder does it, in fewer steps.
        data = self._rest + self.bytes_of(token_id)
        text, decoded = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[decoded:]
        return text

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


@dataclass(eq=False)
class WindowDetokenizer:
    """Returns text deltas that together equal the text of all tokens decoded at once, whatever the tokenizer.

    A token cannot be decoded alone: it may end inside a character, and some tokenizers drop the space before the first
    token. So a sliding window of the last tokens is decoded (after the prefix windows of text-generation-inference and
    vLLM), and text is returned once no further token can change it. The window bounds the cost of a token.

    skips: whether `decode` leaves an id out. Such ids take no place in the window.
    """

    decode: Callable[[Sequence[int]], str]
    skips: Callable[[int], bool]
    _window: list[int] = field(init=False, default_factory=list)
    _text: str = field(init=False, default="")
    """The window, decoded."""
    _given: int = field(init=False, default=0)
    """Characters of `_text` that have been returned."""

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        if self.skips(token_id):
            return ""
        self._window.append(token_id)
        self._text = self.decode(self._window)
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
            kept = self.decode(self._window[cut:])
            if kept[-1:] == self._text[-1:]:
                break
            # With some tokenizers a character that is cut in two changes the characters after it.
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
        stops = self._stops if ends else ()
        found = [(start + len(stop), start, stop) for stop in stops if (start := self._held.find(stop)) >= 0]
        if found:
            end, start, self.stop = min(found)
            released, self._held = self._held[: end if self._includes_stop else start], ""
            return released
        return self._release(len(self._held) - max(overlap(self._held, 0, stop) for stop in self._stops))

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the text of an answer is made of its tokens.

    stops: strings that end it. includes_stop: they are part of it. min_tokens: nothing ends it before. skipped: tokens
    that are not part of it. prompt_only: it has none, though a decode node generates at least one. stop_token_ids: the
    request's own, by which it is told that the answer ended.
    """

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    min_tokens: int = 0
    skipped: frozenset[int] = frozenset()
    prompt_only: bool = False
    stop_token_ids: frozenset[int] = frozenset()


class ChoiceText:
    """Detokenizes an answer and ends it at a stop string."""

    __slots__ = ("_detokenizer", "_length", "_matcher", "_min_tokens", "_prompt_only", "_stop_token_ids")

    def __init__(self, detokenizer: ByteDetokenizer | WindowDetokenizer, options: TextOptions) -> None:
        self._prompt_only = options.prompt_only
        self._min_tokens = options.min_tokens
        self._stop_token_ids = options.stop_token_ids
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(options.stops, options.includes_stop)
        self._length = 0
        """Characters that the detokenizer has returned."""

    def push(self, output: Output) -> Delta:
        """Text and tokens, cut after the token that completed a stop string. Outputs come in order, none twice."""
        if self._prompt_only:
            return Delta("", (), (), "length", output.start == 0)
        matcher = self._matcher
        text = ""
        offsets: list[int] = []
        for token in output.tokens:
            offsets.append(self._length)
            piece = self._detokenizer.push(token.token_id)
            self._length += len(piece)
            text += matcher.push(piece, output.start + len(offsets) >= self._min_tokens)
            if matcher.stop is not None:
                break
        # Attempts keep other reasons to themselves.
        finish_reason: EndReason | None = output.finish_reason  # type: ignore[assignment]
        stop: str | int | None = None
        if finish_reason is not None and matcher.stop is None:
            if finish_reason == "stop" and output.tokens and output.tokens[-1].token_id in self._stop_token_ids:
                stop = output.tokens[-1].token_id
            piece = self._detokenizer.finish()
            self._length += len(piece)
            text += matcher.push(piece, ends=True)
            text += matcher.finish()
        if matcher.stop is not None:
            finish_reason, stop = "stop", matcher.stop
        tokens = output.tokens[: len(offsets)]
        return Delta(text, tokens, tuple(offsets), finish_reason, output.start == 0, stop)
