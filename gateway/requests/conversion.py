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
from gateway.requests.chat import ChatCompletionRequest, TemplateVariables
from gateway.requests.generation import CommonFields
from gateway.requests.unsupported import NEUTRAL, FieldPolicy, Neutral

_PASSED_ON = {*CommonFields.model_fields, "chat_template_kwargs"}


class ConvertedRequest(RequestBody, CommonFields):
    """The body of an endpoint that is answered by way of a chat completion."""

    names: ClassVar[Mapping[str, str]]
    """By the name of a chat completion's field, its name here."""
    neutral: ClassVar[Neutral]
    """Like `unsupported.NEUTRAL`, for this endpoint alone."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """The body of the chat completion, without `model`, `stream` and the fields that have the same name."""

    def check_fields(self, policy: FieldPolicy) -> None:
        policy.check(self.model_extra or {}, {**NEUTRAL, **self.neutral})

    def generation(self, policy: FieldPolicy) -> ChatCompletionRequest:
        """The chat completion that the body asks for. Raises ApiError for what that refuses, too."""
        fields = {name: getattr(self, name) for name in _PASSED_ON & self.model_fields_set}
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
