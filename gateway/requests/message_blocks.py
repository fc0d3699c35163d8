"""The blocks of the messages of POST /v1/messages, and the conversation that they are."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.requests.body import JsonObject, Piece, TextOr, kinds
from gateway.requests.chat import ToolName
from gateway.requests.generation import MAX_STOP_CHARS

UseId = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class TextBlock(Piece):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Piece):
    """The reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Piece):
    """Reasoning that another server hid, and nobody else can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Piece):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: UseId
    name: ToolName
    input: JsonObject


class SearchResultBlock(Piece):
    """A source that a tool found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[SearchResultBlock, Tag("<search_result>")],
    kinds("a block of type text or search_result"),
]


class ToolResultBlock(Piece):
    """What a call returned. is_error: the text is expected to say so; models get nothing but the text."""

    type: Literal["tool_result"]
    tool_use_id: UseId
    content: TextOr[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    kinds("a block of type text, thinking, tool_use or tool_result"),
]


class MessageTurn(Piece):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Block]


def messages_of(turn: MessageTurn) -> list[dict[str, Any]]:
    """A turn as messages of a chat: the assistant's is one, and of a user's, each result of a tool is one."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return [_answer(turn.content)] if turn.role == "assistant" else _said(turn.role, turn.content)


def text_of(content: str | Sequence[TextBlock | SearchResultBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _answer(blocks: Sequence[Block]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _said(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case ToolResultBlock():
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)})
            case TextBlock() if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + block.text
            case TextBlock():
                messages.append({"role": role, "content": block.text})
    return messages or [{"role": role, "content": ""}]
