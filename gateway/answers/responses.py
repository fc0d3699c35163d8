"""Answers of /v1/responses: a response with its output items, whole and in events."""

import time
import uuid
from bisect import bisect_left
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.answers.blocks import Block, BlockAnswer, Change
from gateway.answers.chat import ChosenLogprob, chosen_logprob
from gateway.answers.streamed import CHARACTER_BYTES, Column, Json, StreamedAnswer
from gateway.attempt import Delta
from gateway.errors import ApiError
from gateway.preparer import PreparedRequest
from gateway.requests.responses import ResponsesRequest

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}

Status = Literal["completed", "incomplete", "in_progress"]
Nothing = Annotated[list[Any], Field(max_length=0)]


class OutputText(TypedDict):
    """Text. logprobs: if they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: Nothing
    logprobs: Column[ChosenLogprob]


class ItemHead(TypedDict):
    """What items have in common."""

    id: str
    status: Status


class OutputMessage(ItemHead):
    """The answer."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningPart(TypedDict):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ItemHead):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    summary: Nothing
    content: list[ReasoningPart]


class OutputCall(ItemHead):
    """A call of a tool. arguments: JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | OutputReasoning | OutputCall


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class GivenReasoning(TypedDict):
    """What the request says."""

    effort: str | None
    summary: None


class InputDetails(TypedDict):
    """Of the prompt, tokens that did not have to be computed, and tokens that were stored for later."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(TypedDict):
    """A response. Nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    presence_penalty: float
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


class ResponseAnswer(BlockAnswer, StreamedAnswer):
    """Items of reasoning, text and calls."""

    named = True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.prepared.body, ResponsesRequest)
        self._source = self.prepared.body
        self._created = int(time.time())
        self._sequence = count()
        self._ids: list[str] = []
        """By block, the id of its item."""
        self._logprobs: dict[int, Column[ChosenLogprob]] = {}
        """By block of text. Streams repeat them at its end."""
        self._tokens: Column[ChosenLogprob] = Column()
        """Log probabilities of tokens whose text is not there yet."""

    def whole(self) -> Response:
        return self._final()

    def begin(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def delta_events(self, index: int, delta: Delta) -> list[Json]:
        self._count(CHARACTER_BYTES * len(delta.text))
        return [event for change in self._push(delta) for event in self._events(change)]

    def end(self) -> list[Json]:
        response = self._final()
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", list(map(self._item, self._blocks)))
        response["error"] = {"code": code, "message": error.message}
        return [self._event("response.failed", response=response)]

    def _push(self, delta: Delta) -> list[Change]:
        changes = super()._push(delta)
        if self._source.with_logprobs:
            before = len(self._tokens)
            answered = delta.tokens[bisect_left(delta.offsets, self._parser.reasoned) :]
            self._tokens.extend(
                chosen_logprob(token, self.tokenizer.piece, self.tokenizer.piece_bytes) for token in answered
            )
            self._count(len(self._tokens) - before)
        return changes

    def _note(self, change: Change) -> Column[ChosenLogprob]:
        """Keep what a change brings in addition to text. Returns the log probabilities that belong to it."""
        block = change.block
        if change.kind == "opened":
            self._ids.append(_PREFIXES[block.kind] + uuid.uuid4().hex)
            self._logprobs[block.number] = Column()
        if change.kind != "grew":
            return Column()
        tokens, self._tokens = self._tokens, Column()
        if block.kind != "text":
            return Column()
        self._logprobs[block.number].append(tokens)
        return tokens

    def _events(self, change: Change) -> list[Json]:
        tokens = self._note(change)
        block = change.block
        at: dict[str, Any] = {"output_index": block.number, "item_id": self._ids[block.number]}
        if block.kind != "call":
            at["content_index"] = 0
        match change.kind:
            case "opened":
                item = self._item(block, begins=True)
                added = self._event("response.output_item.added", output_index=block.number, item=item)
                if block.kind == "call":
                    return [added]
                return [added, self._event("response.content_part.added", **at, part=self._part(block, Column(), ""))]
            case "grew":
                more: dict[str, Any] = {"logprobs": tokens} if block.kind == "text" else {}
                return [self._event(f"response.{_EVENTS[block.kind]}.delta", **at, delta=change.text, **more)]
            case "closed":
                closing = self._closing(block, at)
                item = self._item(block)
                return [*closing, self._event("response.output_item.done", output_index=block.number, item=item)]

    def _closing(self, block: Block, at: dict[str, Any]) -> list[Json]:
        done = f"response.{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            return [self._event(done, **at, name=block.name, arguments=block.text)]
        logprobs = self._logprobs[block.number]
        more: dict[str, Any] = {"logprobs": logprobs} if block.kind == "text" else {}
        return [
            self._event(done, **at, text=block.text, **more),
            self._event("response.content_part.done", **at, part=self._part(block, logprobs, block.text)),
        ]

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "sequence_number": next(self._sequence), **fields}

    def _item(self, block: Block, begins: bool = False) -> Item:
        """begins: the item before anything of it. The block may have grown since."""
        status: Status = "in_progress" if begins else "completed" if block.complete else "incomplete"
        head: ItemHead = {"id": self._ids[block.number], "status": status}
        match block.kind:
            case "call":
                text = "" if begins else block.text
                return OutputCall(**head, type="function_call", call_id=block.call_id, name=block.name, arguments=text)
            case "text":
                texts = [] if begins else [_output_text(block.text, self._logprobs[block.number])]
                return OutputMessage(**head, type="message", role="assistant", content=texts)
            case "reasoning":
                parts: list[ReasoningPart] = [] if begins else [{"type": "reasoning_text", "text": block.text}]
                return OutputReasoning(**head, type="reasoning", summary=[], content=parts)

    def _part(self, block: Block, logprobs: Column[ChosenLogprob], text: str) -> OutputText | ReasoningPart:
        return {"type": "reasoning_text", "text": text} if block.kind == "reasoning" else _output_text(text, logprobs)

    def _final(self) -> Response:
        complete = self._finish_reason == "stop"
        response = self._response("completed" if complete else "incomplete", list(map(self._item, self._blocks)))
        if complete:
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: Status | Literal["failed"], output: list[Item]) -> Response:
        source, chat = self._source, self.prepared.request
        return {
            "id": self.prepared.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": chat.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": source.instructions,
            "max_output_tokens": source.max_output_tokens,
            "max_tool_calls": source.max_tool_calls,
            "metadata": source.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": source.parallel_tool_calls is not False,
            "presence_penalty": chat.presence_penalty or 0.0,
            "previous_response_id": None,
            "prompt_cache_key": source.prompt_cache_key,
            "reasoning": {"effort": source.reasoning.effort if source.reasoning else None, "summary": None},
            "safety_identifier": source.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": source.given_text(),
            "tool_choice": source.given_tool_choice(),
            "tools": source.given_tools(),
            "top_logprobs": source.top_logprobs or 0,
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": source.truncation or "disabled",
            "usage": None
            if status == "in_progress"
            else usage_of(self.prepared, self._output_tokens, self._reasoning_tokens),
            "user": source.user,
        }


def usage_of(prepared: PreparedRequest, output_tokens: int, reasoning_tokens: int) -> ResponseUsage:
    return {
        "input_tokens": prepared.prompt_tokens,
        "input_tokens_details": {"cached_tokens": prepared.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prepared.prompt_tokens + output_tokens,
    }


def _output_text(text: str, logprobs: Column[ChosenLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
