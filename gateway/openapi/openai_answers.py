"""Answers of /v1/completions and /v1/chat/completions."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.openapi.described import Described


class PromptDetails(Described):
    """cached_tokens: of the prompt, those that did not have to be computed."""

    cached_tokens: int


class Usage(Described):
    """Token counts over all prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Described):
    """By token of the answer, and of the prompt in an echo, of which the first token has none. top_logprobs: by text.
    text_offset: where in the text the token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class RankedToken(Described):
    """A token that could stand at a position of the prompt. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, RankedToken] | None],
    Field(
        default=[],
        description="With prompt_logprobs: by position, by token id, the prompt's token and the likeliest ones. "
        "Null for the first token.",
    ),
]


class _Choice(Described):
    # Only with return_token_ids, where it is no null.
    token_ids: Annotated[list[int], Field(default=[], description="With return_token_ids.")]


class CompletionChoice(_Choice):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs


class Completion(Described):
    """The answers to a completion request. Chunks of a stream have the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChosenFunction(Described):
    """arguments: JSON text."""

    name: str
    arguments: str


class ChosenCall(Described):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ChosenFunction


class AnswerMessage(Described):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: Annotated[str, Field(default="", description="Where the model reasoned.")]
    tool_calls: Annotated[list[ChosenCall], Field(default=[], description="Where the model calls tools.")]


class TokenLogprob(Described):
    """A token and its log probability. bytes: they may be a part of a character."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and others that were likely there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Described):
    """By token of the answer, reasoning and calls included."""

    content: list[ChosenLogprob]
    refusal: None


class ChatChoice(_Choice):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletion(Described):
    """The answers to a chat completion request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs
