"""Request bodies of OpenAI's API, validated.

Types are strict: neither "5" nor true is an integer. Fields that are not declared here are for `gateway.unsupported`.
"""

import secrets
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from control.messages import Sampling, TokenId
from gateway.errors import ApiError, context_length_exceeded, shown
from gateway.registry import Capacity
from gateway.unsupported import HARMLESS, NEUTRAL, OF_MESSAGES, OF_STREAMS, refuse

_MAX_STOPS = 16
_MAX_STOP_CHARS = 256

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TemplateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=_MAX_STOP_CHARS)] | None
"""Switches for a chat template. Structures are refused: templates are not written to be safe with them."""


def _prompt(value: object) -> str | list[int]:
    """A prompt, which may come as a list of one prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and any(isinstance(element, str | list) for element in value):
        raise PydanticCustomError("one_prompt", "expected one prompt, found a list of several; send one request each")
    if not isinstance(value, str) and not (isinstance(value, list) and all(type(e) is int for e in value)):
        raise PydanticCustomError("prompt_type", "expected a string or a list of integer token ids")
    if not value:
        raise PydanticCustomError("empty_prompt", "expected at least one token, found an empty prompt")
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "expected a string or a list of strings")
    if len(stops) > _MAX_STOPS:
        raise PydanticCustomError("stops", f"expected at most {_MAX_STOPS} stop strings, found {len(stops)}")
    if any(not 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError("stop_length", f"expected stop strings of 1 to {_MAX_STOP_CHARS} characters")
    return stops


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class GenerationRequest(BaseModel, ABC):
    """The fields of both endpoints. As in OpenAI's API, null means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None]
    """How many tokens to generate by default; None: as many as the context has room for."""
    neutral: ClassVar[dict[str, tuple[Any, ...]]]
    """Like `unsupported.NEUTRAL`, for this endpoint alone."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Int64 | None = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _usage_needs_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options: only allowed when stream is true")
        return self

    def refuse_unsupported(self) -> None:
        """Raises ApiError for a field that asks for what is not implemented."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if name not in HARMLESS}
        refuse(fields, {**NEUTRAL, **self.neutral})
        if self.stream_options is not None:
            refuse(self.stream_options.model_extra or {}, OF_STREAMS, "stream_options.")

    def requested_tokens(self) -> int | None:
        return self.max_tokens

    @abstractmethod
    def requested_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: no log probabilities."""

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            top_logprobs=self.requested_logprobs(),
        )

    def max_new_tokens(self, prompt_tokens: int, capacity: Capacity) -> int:
        """How many tokens to generate. Raises ApiError if prompt or output is longer than `capacity`."""
        room = capacity.context - prompt_tokens
        if room < 1:
            raise context_length_exceeded(
                f"The maximum context length is {capacity.context} tokens, but the prompt has {prompt_tokens} tokens "
                "and at least one is to be generated. Shorten the prompt.",
                self.prompt_field,
            )
        if prompt_tokens > capacity.prompt:
            raise context_length_exceeded(
                f"The longest prompt that can be computed now has {capacity.prompt} tokens, but the prompt has "
                f"{prompt_tokens}. Shorten the prompt.",
                self.prompt_field,
            )
        asked = self.requested_tokens()
        if asked is None:
            return room if self.default_tokens is None else min(room, self.default_tokens)
        if asked > room:
            raise context_length_exceeded(
                f"The maximum context length is {capacity.context} tokens, but {prompt_tokens + asked} were requested "
                f"({prompt_tokens} in the prompt, {asked} to generate). Reduce max_tokens or shorten the prompt.",
                "max_tokens",
            )
        return asked


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field = "prompt"
    default_tokens = 16
    neutral: ClassVar = {"add_special_tokens": (True,)}

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def requested_logprobs(self) -> int | None:
        return self.logprobs


def _content(value: object) -> str:
    """The text of a message, which may come in parts."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value or ""}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("content_type", "expected a string or a list of parts of type 'text'")
    return "\n".join(str(text) for text in texts)


class ChatMessage(BaseModel):
    """One message. Fields that are not declared here are for `gateway.unsupported`."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None

    def rendered(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        others = self.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
        return {"role": self.role, "content": self.content, **others}


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    default_tokens = None
    neutral: ClassVar = {"add_special_tokens": (False,)}

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[TemplateName, TemplateValue], Field(max_length=_MAX_STOPS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs: only allowed when logprobs is true")
        return self

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for index, message in enumerate(self.messages):
            refuse(message.model_extra or {}, OF_MESSAGES, f"messages.{index}.")

    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_Request = TypeVar("_Request", bound=GenerationRequest)


def parse(kind: type[_Request], body: bytes) -> _Request:
    """A validated request. Raises ApiError (400) that names the field, what was expected and what was found."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = f"{field}: {first['msg']}" if field else first["msg"]
        if field and first["type"] != "missing":
            message += f", found {shown(first['input'])}"
        raise ApiError(400, message, param=field or None) from error
    request.refuse_unsupported()
    return request
