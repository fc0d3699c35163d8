"""The bytes that a token stands for, as its vocabulary spells them."""

import re
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How sentencepiece spells the single bytes that it falls back on."""


def _byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable ones are their own, others follow from 256.

    GPT-2's, which every byte-level tokenizer has kept.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """Spells tokens of one `transformers` tokenizer that has a `tokenizers` backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder
        is_byte_level = decoder is not None and decoder.decode(["\u0120"]) == " "
        self._alphabet = _byte_level_alphabet() if is_byte_level else {}

    def of(self, token_id: int, text: str) -> bytes:
        """The token's bytes, which may be part of a character. `text`: what it decodes to on its own."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if self._alphabet:
            return bytes(self._alphabet[character] for character in spelled if character in self._alphabet)
        if byte := _FALLBACK.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        return text.encode()
