"""What bodies that ask for generated text have in common, and how they become `control.messages.Sampling`."""

import secrets
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from control.messages import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASES,
    MAX_CHOICES,
    Bias,
    Penalty,
    RepetitionPenalty,
    Sampling,
    TokenId,
)
from control.prompt_logprobs import Alternatives, too_many
from gateway.errors import context_length_exceeded, shown, wrong
from gateway.registry import Capacity
from gateway.requests.body import FieldPolicy, Piece, RequestBody
from gateway.requests.structure import StructureFields
from gateway.tokenizer import CheckpointTokenizer

MAX_PRIORITY = 1000
"""The least urgent priority, and with a minus sign the most urgent one."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]


def _stops(value: object) -> list[object]:
    if not isinstance(value, str | list | None):
        raise PydanticCustomError("stop_type", "expected a string or a list of strings")
    return [value] if isinstance(value, str) else value or []


class StreamOptions(Piece):
    """include_usage: usage in a chunk of its own at the end. continuous_usage_stats: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(Piece):
    """Fields that mean the same at all endpoints that generate, as in vLLM. Some go to `Sampling` by their name."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BIASES // 2)] | None = None
    stop: Annotated[StopStrings, BeforeValidator(_stops, json_schema_input_type=StopString | StopStrings | None)] = (
        Field(default_factory=list)
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


class GenerationRequest(RequestBody, CommonFields, StructureFields, ABC):
    """The fields of OpenAI's endpoints, and vLLM's additions to them."""

    generates = True
    prompt_field: ClassVar[str]
    default_tokens: ClassVar[int | None]
    """How many tokens to generate by default; None: as many as the context has room for."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_draft_counts: bool | None = None
    prompt_logprobs: Alternatives | None = None

    def generation(self, policy: FieldPolicy) -> Self:
        """The body itself: the other endpoints' bodies become one of these."""
        return self

    @model_validator(mode="after")
    def _streams_only_what_can_be_streamed(self) -> "GenerationRequest":
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs: not supported when stream is true")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options: only allowed when stream is true")
        return self

    @property
    def choices(self) -> int:
        """How many answers of each prompt are asked for."""
        return self.n or 1

    @property
    def computed_choices(self) -> int:
        """How many answers of each prompt are generated, of which the best `choices` are given."""
        return self.choices

    def requested_tokens(self) -> int | None:
        return self.max_tokens

    @abstractmethod
    def requested_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None: no log probabilities."""

    def requested_prompt_logprobs(self) -> int | None:
        """How many alternatives to report with each token of the prompt; None: no log probabilities."""
        return self.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is the prompt alone."""
        return False

    def check_prompt_logprobs(self, prompt_tokens: int) -> None:
        """Raises ApiError where more of them are asked for than an answer has. prompt_tokens: of all prompts."""
        asked = self.requested_prompt_logprobs()
        if asked is not None and (reason := too_many(prompt_tokens * self.computed_choices, asked)):
            field = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
            raise wrong(field, reason)

    def sampling(self, tokenizer: CheckpointTokenizer) -> Sampling:
        """How the first answer is drawn; the following ones have the seeds that follow. Raises ApiError."""
        given = {name: getattr(self, name) for name in _SAME_NAME}
        own = {
            "top_k": max(0, self.top_k or 0),
            "seed": secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            "top_logprobs": self.requested_logprobs(),
            "logit_bias": tuple(self._biases(tokenizer.vocab_size).items()),
            "allowed_token_ids": self._allowed(tokenizer.vocab_size),
            "bad_words": self._bad_words(tokenizer),
        }
        return Sampling(**{name: value for name, value in {**given, **own}.items() if value is not None})

    def max_new_tokens(self, prompt_tokens: int, capacity: Capacity) -> int:
        """How many tokens to generate. Raises ApiError if prompt or output is longer than `capacity`."""
        room = capacity.context - prompt_tokens
        if prompt_tokens > (longest := min(capacity.context - 1, capacity.prompt)):
            computed = f", of which {capacity.prompt} can be computed now" if capacity.prompt == longest else ""
            raise context_length_exceeded(
                f"{capacity.context} tokens{computed}",
                f"the prompt has {prompt_tokens} tokens and at least one is to be generated. Shorten the prompt.",
                f"prompt is too long: {prompt_tokens} tokens > {longest} maximum",
                self.prompt_field,
            )
        asked = self.requested_tokens()
        if asked is not None and (self.min_tokens or 0) > asked:
            raise wrong("min_tokens", f"expected at most max_tokens, {asked}")
        if asked is None:
            return room if self.default_tokens is None else min(room, self.default_tokens)
        if asked > room:
            raise context_length_exceeded(
                f"{capacity.context} tokens",
                f"{prompt_tokens + asked} were requested ({prompt_tokens} in the prompt, {asked} to generate). Reduce "
                "max_tokens or shorten the prompt.",
                f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {asked} > {capacity.context}, "
                "decrease input length or `max_tokens` and try again",
                "max_tokens",
            )
        return asked

    def truncated(self, token_ids: list[int], context: int) -> list[int]:
        """The last tokens of a prompt, as many as are asked for; -1: all but one of the context."""
        most = self.truncate_prompt_tokens
        if most is None:
            return token_ids
        return token_ids[-most if most > 0 else 1 - context :] if most else []

    def _biases(self, vocab_size: int) -> dict[int, float]:
        for token in self.logit_bias or {}:
            # Python refuses to convert thousands of digits.
            if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < vocab_size):
                raise wrong("logit_bias", f"expected token ids from 0 to {vocab_size - 1}, found {shown(token)}")
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    def _allowed(self, vocab_size: int) -> tuple[int, ...] | None:
        if self.allowed_token_ids is not None and (most := max(self.allowed_token_ids)) >= vocab_size:
            raise wrong("allowed_token_ids", f"expected token ids from 0 to {vocab_size - 1}, found {most}")
        return None if self.allowed_token_ids is None else tuple(dict.fromkeys(self.allowed_token_ids))

    def _bad_words(self, tokenizer: CheckpointTokenizer) -> tuple[tuple[int, ...], ...]:
        spellings: list[tuple[int, ...]] = []
        room = MAX_BAD_WORD_TOKENS
        for word in self.bad_words or ():
            found = tokenizer.spellings(word)
            room -= sum(map(len, found))
            if room < 0:
                limit = f"at most {MAX_BAD_WORD_TOKENS} tokens in the spellings of all words together"
                raise wrong("bad_words", f"expected {limit}, exceeded at {shown(word)}")
            spellings += found
        return tuple(spellings)


_SAME_NAME = Sampling.model_fields.keys() & CommonFields.model_fields.keys()
