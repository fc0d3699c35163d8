"""Answers of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.openapi.described import Described
from gateway.openapi.openai_answers import ChosenLogprob

Status = Literal["completed", "incomplete", "in_progress"]


class OutputText(Described):
    """Text. logprobs: if they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChosenLogprob]


class OutputMessage(Described):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningPart(Described):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Described):
    """What the model thought before it answered."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningPart]
    encrypted_content: None


class OutputCall(Described):
    """A call of a tool. arguments: JSON text."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseError(Described):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Described):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class GivenReasoning(Described):
    """What the request says."""

    effort: str | None
    summary: None


class InputDetails(Described):
    """Of the prompt, tokens that did not have to be computed, and tokens that were stored for later."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Described):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(Described):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Described):
    """A response. Nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: GivenReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
