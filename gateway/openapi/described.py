"""The base of the models that describe answers. Nothing validates by them but tests: answers are written by hand."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """Exactly these fields."""

    model_config = ConfigDict(extra="forbid")


class ModelCard(Described):
    """The model that is served. created: Unix time in seconds. max_model_len: of prompt and answer, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Described):
    """All models that are served, which is one."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenCount(Described):
    """How many tokens a conversation has."""

    input_tokens: int


class Tokenized(Described):
    """The tokens of a text. count: how many. token_strs: as the vocabulary spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Described):
    """The text of tokens."""

    prompt: str


class HealthAnswer(Described):
    """The process runs."""

    status: Literal["ok"]


class Ready(Described):
    """Requests can be served."""

    status: Literal["ready"]


class NotReady(Described):
    """Requests cannot be served now."""

    status: Literal["not ready"]
    reason: str


class Version(Described):
    """The project's version, and that of the protocol between its processes."""

    version: str
    protocol: int


class ErrorDetail(Described):
    """param: the field that is wrong, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Described):
    """An error, as OpenAI's API writes it."""

    error: ErrorDetail


class AnthropicErrorDetail(Described):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Described):
    """An error, as Anthropic's API writes it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
