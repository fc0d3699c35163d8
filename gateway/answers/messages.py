"""Answers of /v1/messages: Anthropic's."""

import hashlib
import json
from typing import Any, Literal

from typing_extensions import TypedDict

from gateway.answers.blocks import Block, BlockAnswer, Change
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.attempt import Delta
from gateway.errors import ApiError
from gateway.requests.messages import MessagesRequest

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    """What the model thought before it answered. signature: nothing checks it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Ending(TypedDict):
    """Why an answer ended; null while it goes on."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class Message(Ending):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    usage: MessageUsage


class MessageAnswer(BlockAnswer, StreamedAnswer):
    """Blocks of thinking, text and calls."""

    named = True

    def __post_init__(self) -> None:
        super().__post_init__()
        body = self.prepared.body
        assert isinstance(body, MessagesRequest)
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._drops_thinking = body.thinking is not None and body.thinking.type == "disabled"
        """Of a model that reasons nevertheless."""
        self._dropped = 0
        """Blocks."""
        self._pinged = False

    def whole(self) -> Message:
        blocks = (block for block in self._blocks if block.kind != "reasoning" or not self._drops_thinking)
        return self._message(list(map(self._block, blocks)))

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message([])}]

    def delta_events(self, index: int, delta: Delta) -> list[Json]:
        events: list[Json] = []
        for change in self._push(delta):
            events += self._events(change)
            if not self._pinged:
                self._pinged = True
                events.append({"type": "ping"})
        return events

    def end(self) -> list[Json]:
        return [
            {"type": "message_delta", "delta": self._ending(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> list[Json]:
        return [error.anthropic_body()]

    def _events(self, change: Change) -> list[Json]:
        block = change.block
        if block.kind == "reasoning" and self._drops_thinking:
            self._dropped += change.kind == "opened"
            return []
        index = block.number - self._dropped
        match change.kind:
            case "opened":
                empty = self._block(block, begins=True)
                return [{"type": "content_block_start", "index": index, "content_block": empty}]
            case "grew":
                delta = self._delta(block, change.text)
                return [] if delta is None else [_block_delta(index, delta)]
            case "closed":
                stop = {"type": "content_block_stop", "index": index}
                if block.kind != "reasoning":
                    return [stop]
                return [_block_delta(index, {"type": "signature_delta", "signature": _signature(block)}), stop]

    def _delta(self, block: Block, text: str) -> Json | None:
        match block.kind:
            case "reasoning":
                return {"type": "thinking_delta", "thinking": text} if self._shows_thinking else None
            case "text":
                return {"type": "text_delta", "text": text}
            case "call":
                return {"type": "input_json_delta", "partial_json": text}

    def _block(self, block: Block, begins: bool = False) -> Content:
        """begins: the block before anything of it. Otherwise it belongs to a whole answer, where calls are complete."""
        match block.kind:
            case "reasoning":
                thinking = block.text if self._shows_thinking and not begins else ""
                return {"type": "thinking", "thinking": thinking, "signature": "" if begins else _signature(block)}
            case "text":
                return {"type": "text", "text": "" if begins else block.text}
            case "call":
                arguments = {} if begins else json.loads(block.text)
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}

    def _message(self, content: list[Content]) -> Message:
        return {
            "id": self.prepared.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **self._ending(),
            "usage": self._usage(),
        }

    def _ending(self) -> Ending:
        stop = self._ended_by if isinstance(self._ended_by, str) else None
        reason: StopReason | None
        match self._finish_reason:
            case None:
                reason = None
            case "length":
                reason = "max_tokens"
            case _ if any(block.kind == "call" and block.complete for block in self._blocks):
                reason, stop = "tool_use", None
            case _:
                reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> MessageUsage:
        cached = self.prepared.cached_tokens
        return {
            "input_tokens": self.prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
        }


def _block_delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _signature(block: Block) -> str:
    """What stands where Anthropic signs its reasoning. Clients send it back, and nothing checks it."""
    return hashlib.sha256(block.text.encode()).hexdigest()
