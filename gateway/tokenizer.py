"""The checkpoint as the gateway sees it: its tokenizer, chat template, vocabulary, stop tokens and context."""

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateError
from transformers import AutoTokenizer

from gateway.errors import ApiError
from gateway.token_bytes import TokenBytes
from service.errors import StartupError

log = structlog.get_logger(__name__)


class CheckpointTokenizer:
    """Text to token ids and back.

    Any thread may call it: what would change the library's tokenizer, and is not safe, happens in the constructor.
    """

    def __init__(self, model_path: str) -> None:
        """Raises StartupError if the directory is not a checkpoint with a tokenizer."""
        directory = Path(model_path)
        if not directory.is_dir():
            raise StartupError(f"--model-path {model_path}: no such directory; give a Hugging Face checkpoint")
        config = _read_json(directory / "config.json")
        if config is None:
            raise StartupError(f"--model-path {model_path}: no config.json; give a Hugging Face checkpoint")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
            # The first call may change the tokenizer's truncation settings; no later one does.
            self.encode("a", special_tokens=False)
        except Exception as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise StartupError(f"--model-path {model_path}: cannot load its tokenizer: {first_line}") from error
        self.vocab_size = _positive_int(config, "vocab_size", model_path)
        self.context_length = _positive_int(config, "max_position_embeddings", model_path)
        self.stop_token_ids = _eos_ids(_read_json(directory / "generation_config.json") or {}, config)
        self.has_chat_template = bool(getattr(self._tokenizer, "chat_template", None))
        self._reserved_variables = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        self._reserved_variables |= self._tokenizer.special_tokens_map.keys()
        self._token_bytes = TokenBytes(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def render_chat(self, messages: Sequence[dict[str, str]], variables: Mapping[str, object]) -> str:
        """The prompt that the chat template makes of a conversation. Raises ApiError if the template refuses it.

        variables: what the template may ask for beside the messages.
        """
        if not self.has_chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        if reserved := variables.keys() & self._reserved_variables:
            name = min(reserved)
            raise ApiError(400, f"chat_template_kwargs: {name} cannot be set", param="chat_template_kwargs")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except TemplateError as error:
            raise ApiError(400, f"messages: the chat template refused them: {error}", param="messages") from error
        except Exception as error:  # an expression of the template, which these messages and variables do not suit
            log.warning("the chat template failed", error=repr(error))
            raise ApiError(400, "messages: the chat template cannot render them", param="messages") from error
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Ids that the tokenizer does not know are empty."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def skips(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out: it is special, or the tokenizer does not know it."""
        return token_id in self._special_ids or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def piece(self, token_id: int) -> str:
        """One token on its own, special or not, as log probabilities name it."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character: those of an answer's tokens make up its text."""
        return self._token_bytes.of(token_id, self.piece(token_id))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"cannot read {path}: expected a JSON object, found {type(content).__name__}")
    return content


def _positive_int(config: dict[str, Any], key: str, model_path: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{model_path}/config.json: {key} must be a positive integer, found {value!r}")
    return value


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of the first configuration that has any."""
    for config in configs:
        found = config.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if valid := [i for i in ids if isinstance(i, int)]:
            return tuple(valid)
    return ()
