"""A checkpoint's vocabulary as grammars need it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from engine.grammar import UnsupportedTokenizer


class Vocabulary:
    """The tokens of a model. Immutable; any thread may use it.

    Byte-level BPE and vocabularies with sentencepiece's byte fallback are supported. An added token (special or not, as
    `<tool_call>`) never counts as the text that it is spelled with: a grammar has to ask for the token. Ids without a
    token (padding of the embedding) are never allowed.
    """

    def __init__(self, tokenizer_json: Mapping[str, Any], vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """tokenizer_json: the content of tokenizer.json. vocab_size: rows of the model's logits. stop_token_ids: those
        of the checkpoint, which end every grammar. Raises UnsupportedTokenizer."""
        if not stop_token_ids or not all(0 <= token_id < vocab_size for token_id in stop_token_ids):
            found = list(stop_token_ids)
            raise UnsupportedTokenizer(f"grammars need end-of-sequence tokens below {vocab_size}, found {found}")
        added = [token | {"special": True} for token in tokenizer_json.get("added_tokens", [])]
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        """int32 words of a mask."""
        self.stop_token_ids = tuple(stop_token_ids)
        self.added_tokens: dict[int, str] = {
            token["id"]: token["content"] for token in added if token["id"] < vocab_size
        }
        try:
            known = np.zeros(self.words * 32, dtype=np.bool_)
            known[_ids(tokenizer_json["model"]["vocab"], self.added_tokens)] = True
            # Truncation and padding change no token, but the library refuses or applies them.
            text = json.dumps({**tokenizer_json, "added_tokens": added, "truncation": None, "padding": None})
            self.library = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(stop_token_ids))
        except BaseException as error:
            # What the library did not expect, as a token of more than 255 bytes, is a panic: no Exception in Python.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnsupportedTokenizer(f"grammars cannot use this tokenizer: {first_line}") from error
        self.known: npt.NDArray[np.int32] = np.packbits(known, bitorder="little").view(np.int32)
        """A mask of all ids that have a token."""
        self.known.flags.writeable = False

    @classmethod
    def load(cls, directory: Path, vocab_size: int, stop_token_ids: Sequence[int]) -> "Vocabulary":
        """Read a checkpoint's tokenizer.json, and the added tokens that only tokenizer_config.json has. Takes seconds
        and some 150 MB for 129,280 tokens. Raises UnsupportedTokenizer."""
        try:
            content: dict[str, Any] = json.loads((directory / "tokenizer.json").read_bytes())
            config = directory / "tokenizer_config.json"
            named = json.loads(config.read_bytes()).get("added_tokens_decoder", {}) if config.is_file() else {}
            added = {token["id"]: token for token in content.get("added_tokens", [])}
            for token_id, token in named.items():
                added.setdefault(int(token_id), {**_PLAIN, **token, "id": int(token_id)})
            return cls({**content, "added_tokens": list(added.values())}, vocab_size, stop_token_ids)
        except (FileNotFoundError, PermissionError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UnsupportedTokenizer(f"cannot read the tokenizer of {directory}: {error}") from error


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""The fields that an added token has in tokenizer.json."""


def _ids(vocab: object, added: Mapping[int, str]) -> list[int]:
    """All ids that have a token. vocab: of a BPE, {token: id}, or of a unigram model, [[token, score], ...]."""
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))  # type: ignore[arg-type]
    return [*ids, *added]
