"""Answers of /v1/messages."""

from typing import Any, Literal

from gateway.openapi.described import Described


class TextContent(Described):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(Described):
    """What the model thought before it answered. signature: nothing checks it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Described):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Described):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswered(Described):
    """The assistant's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
