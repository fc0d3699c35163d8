"""The bytes that a token stands for."""

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How sentencepiece spells a single byte, for text that is not in its vocabulary."""


class TokenBytes:
    """The bytes of tokens of a `transformers` tokenizer that has a `tokenizers` backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder
        is_byte_level = decoder is not None and decoder.decode(["\u0120"]) == " "
        # GPT-2's characters for bytes, which every byte-level tokenizer uses.
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if is_byte_level else {}

    def of(self, token_id: int, text: str) -> bytes:
        """The token's bytes, which may be part of a character. text: the token decoded alone."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if self._byte_of:
            return bytes(self._byte_of[character] for character in spelled if character in self._byte_of)
        if byte := _FALLBACK.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        return text.encode()
