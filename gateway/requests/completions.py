"""POST /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from control.messages import MAX_CHOICES
from gateway.requests.generation import GenerationRequest

Prompt = str | list[int]
"""Text, or token ids."""


def _prompts(value: object) -> list[Prompt]:
    several = isinstance(value, list) and any(isinstance(element, str | list) for element in value)
    prompts: list[Any] = value if isinstance(value, list) and several else [value]
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(e) is int for e in prompt)):
            raise PydanticCustomError(
                "prompt_type", "expected a string or a list of integer token ids, or a list of such prompts"
            )
        if not prompt:
            raise PydanticCustomError("empty_prompt", "expected at least one token, found an empty prompt")
    return prompts


_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[int], Field(min_length=1)]
_PromptInput = (
    _Text | _TokenIds | Annotated[list[_Text], Field(min_length=1)] | Annotated[list[_TokenIds], Field(min_length=1)]
)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt_field = "prompt"
    default_tokens = 16
    neutral: ClassVar = {"add_special_tokens": (True,)}

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_PromptInput)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.choices:
            raise PydanticCustomError("best_of", "best_of: expected at least n, which says how many are given")
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            raise PydanticCustomError("best_of", "best_of: more than n cannot be streamed, since the best comes last")
        if len(self.prompt) * self.computed_choices > MAX_CHOICES:
            raise PydanticCustomError("prompt", f"prompt: expected at most {MAX_CHOICES} answers over all prompts")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens: expected at least 1, or echo with 0")
        return self

    @property
    def computed_choices(self) -> int:
        return max(self.choices, self.best_of or 1)

    def requested_logprobs(self) -> int | None:
        # Which answers are the best is told by the log probabilities of their tokens.
        return 0 if self.logprobs is None and self.computed_choices > self.choices else self.logprobs

    def requested_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0

    def requested_tokens(self) -> int | None:
        return 1 if self.prompt_only else self.max_tokens
