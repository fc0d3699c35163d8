"""The bytes that a token stands for."""

import re

from tokenizers import Tokenizer, decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
        self._known: dict[int, bytes] = {}
        """Those that were asked for, at most the vocabulary."""

    def of(self, token_id: int) -> bytes:
        """The token's bytes, which may be part of a character; none of an id that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            spelled = self._tokenizer.id_to_token(token_id)
            if spelled is None:
                return b""
            known = self._known[token_id] = self._of(token_id, spelled)
        return known

    def _of(self, token_id: int, spelled: str) -> bytes:
        if self._byte_of:
            # As the decoder has it: added tokens are spelled as they are, unless they look like bytes.
            is_bytes = all(character in self._byte_of for character in spelled)
            return bytes(self._byte_of[character] for character in spelled) if is_bytes else spelled.encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        if byte := _FALLBACK.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
