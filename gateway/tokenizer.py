"""What the gateway reads of a checkpoint: tokenizer, chat template, vocabulary, stop tokens and context length."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from base.errors import StartupError
from base.version import VERSION
from gateway.detokenizer import ByteDetokenizer, TokenBytes, WindowDetokenizer
from gateway.errors import wrong
from gateway.formats.conversation import PromptEnd
from model.checkpoint import read_json
from service.checkpoint import identify, positive_int, stop_token_ids

log = structlog.get_logger(__name__)


class CheckpointTokenizer:
    """Text to token ids and back. Any thread may call it: only the constructor changes the library's tokenizer."""

    def __init__(self, model_path: str, chat_template: Path | None = None) -> None:
        """chat_template: a file to use instead of the checkpoint's. Raises StartupError if one of them is unusable."""
        directory = Path(model_path)
        if not directory.is_dir():
            raise StartupError(f"--model-path {model_path}: no such directory; give a Hugging Face checkpoint")
        config = read_json(directory / "config.json")
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
            # What it wraps, for what is called with each token.
            self._backend: Tokenizer = self._tokenizer.backend_tokenizer
            # The first call may change the tokenizer's truncation settings, which is not thread safe.
            self.encode("a", special_tokens=False)
        except Exception as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise StartupError(f"--model-path {model_path}: cannot load its tokenizer: {first_line}") from error
        self.identity = identify(directory)
        self.system_fingerprint = "fp_" + sha256(f"{VERSION} {self.identity}".encode()).hexdigest()[:10]
        """Of this version and the checkpoint, for clients that compare answers."""
        self.vocab_size = self.identity.vocab_size
        self.context_length = positive_int(config, "max_position_embeddings", directory)
        self.stop_token_ids = stop_token_ids(directory)
        self.model_type = str(config.get("model_type", ""))
        if chat_template is not None:
            self._tokenizer.chat_template = _read_template(chat_template)
        self._reserved_variables = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        self._reserved_variables |= self._tokenizer.special_tokens_map.keys()
        self._token_bytes = TokenBytes(self._backend)
        self.piece_bytes = self._token_bytes.of
        """The bytes of one token, which may be part of a character. Together the tokens' bytes are the text. One object
        for the detokenizers of all streams, which stays in the processor's cache."""
        self.piece: Callable[[int], str] = lru_cache(self.vocab_size)(lambda token_id: self.decode([token_id]))
        """One token decoded alone, special or not, as log probabilities name it."""
        added = self._tokenizer.added_tokens_decoder
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        """Tokens that were added to the vocabulary, special or not, by their text."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that are not text."""

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        end: PromptEnd,
    ) -> str:
        """The prompt that the chat template makes of these and of the variables. Raises ApiError if it refuses them."""
        ends = {
            "add_generation_prompt": end is PromptEnd.NEW_ANSWER,
            "continue_final_message": end is PromptEnd.OPEN_MESSAGE,
        }
        if reserved := variables.keys() & self._reserved_variables:
            raise wrong("chat_template_kwargs", f"{min(reserved)} cannot be set")
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **ends, **variables))
        except TemplateError as error:
            raise wrong("messages", f"the chat template refused them: {error}") from error
        except Exception as error:  # from an expression of the template
            log.warning("the chat template failed", error=repr(error))
            raise wrong("messages", "the chat template cannot render them") from error

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ways in which tokens spell a word: at the beginning of a text, and after a space."""
        alone = word.lstrip()
        return sorted({tuple(ids) for text in (alone, " " + alone) if (ids := self.encode(text, special_tokens=False))})

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises ApiError, which names the field, for an id that is not in the vocabulary."""
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                expected = f"expected token ids from 0 to {self.vocab_size - 1}"
                raise wrong(field, f"{expected}, found {token_id} at position {position}")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, with special tokens. Ids that the tokenizer does not know are empty."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, if there is one; of several, that which knows tools."""
        found = getattr(self._tokenizer, "chat_template", None)
        if isinstance(found, dict):
            return found.get("tool_use") or found.get("default")
        return found or None

    def spelled(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them; those that it lacks are empty."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def detokenizer(self, skipped: Collection[int]) -> ByteDetokenizer | WindowDetokenizer:
        """What makes one text of tokens as they arrive. skipped: ids that are not part of it."""
        if self._token_bytes.make_text:
            return ByteDetokenizer(self.piece_bytes, skipped)
        # Vocabularies may be padded with ids that stand for nothing.
        spelled = self._backend.id_to_token
        return WindowDetokenizer(self.decode, lambda token_id: token_id in skipped or spelled(token_id) is None)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {path}: {error}") from error
