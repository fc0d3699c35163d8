"""Bodies of endpoints that are answered by way of a chat completion, so that all of them are served in one way."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ValidationError

from gateway.errors import ApiError
from gateway.requests.body import RequestBody, invalid
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.unsupported import NEUTRAL, FieldPolicy, Neutral

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
"""Fields of a chat completion that have the same name and meaning at the other endpoints, as they have in vLLM."""


class ConvertedRequest(RequestBody):
    """The body of an endpoint that is answered by way of a chat completion.

    `SAMPLING_FIELDS` are not declared, but passed on, and the chat completion validates them.
    """

    id_prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str]]
    """By the name of a chat completion's field, its name here."""
    neutral: ClassVar[Neutral]
    """Like `unsupported.NEUTRAL`, for this endpoint alone."""

    model: str | None = None
    stream: bool | None = None

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """The body of the chat completion, without `model`, `stream` and `SAMPLING_FIELDS`."""

    def check_fields(self, policy: FieldPolicy) -> None:
        others = {name: value for name, value in (self.model_extra or {}).items() if name not in SAMPLING_FIELDS}
        policy.check(others, {**NEUTRAL, **self.neutral})

    def as_chat(self, policy: FieldPolicy) -> ChatCompletionRequest:
        """Raises ApiError for what a chat completion refuses, too."""
        given = self.model_extra or {}
        fields = {name: given[name] for name in SAMPLING_FIELDS if name in given}
        try:
            chat = ChatCompletionRequest.model_validate(
                {"model": self.model, "stream": self.stream, **fields, **self.chat_fields()}
            )
        except ValidationError as error:
            raise invalid(error) from error
        chat.check_fields(policy)
        return chat

    @classmethod
    @contextmanager
    def renaming(cls) -> Iterator[None]:
        """Errors that come from within name the fields as this endpoint does."""
        try:
            yield
        except ApiError as error:
            field, _, rest = (error.param or "").partition(".")
            name = cls.names.get(field, field)
            message = re.sub(rf"^{re.escape(field)}\b", name, error.message) if field else error.message
            message = re.sub(r"\bmax_tokens\b", cls.names.get("max_tokens", "max_tokens"), message)
            raise replace(error, message=message, param=".".join(filter(None, (name, rest))) or None) from error
