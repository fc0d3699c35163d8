"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.requests.body import JsonObject, KindsOf, Piece, TextOr, text_of
from gateway.requests.chat import MAX_TOOLS, CallId, ChatCompletionRequest, ConvertedRequest, ToolName, chat_call
from gateway.requests.generation import StopStrings

_BILLING = "x-anthropic-billing-header"
"""What a block of Claude Code's system prompt begins with. It changes with each request, and is not for the model."""


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
    id: CallId
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


ResultBlock = Annotated[TextBlock | SearchResultBlock, KindsOf("a block of type text or search_result")]


class ToolResultBlock(Piece):
    """What a call returned. is_error: the text is expected to say so; models get nothing but the text."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOr[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    KindsOf("a block of type text, thinking, tool_use or tool_result"),
]


class MessageTurn(Piece):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Block]

    @property
    def blocks(self) -> Sequence[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Tool(Piece):
    """A tool that the model may call and the client runs. input_schema: JSON schema of the arguments."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class AnyChoice(Piece):
    """Whether to call tools at all."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Piece):
    """The one tool that is to be called."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


Choice = Annotated[AnyChoice | ToolChoice, KindsOf("a choice of type auto, any, tool or none")]


class Thinking(Piece):
    """Whether to reason. budget_tokens is a wish: the model ends its reasoning where it likes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(Piece):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Piece):
    """How much to reason, and the form of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class MessagesChat(ChatCompletionRequest):
    """The chat of a conversation in Anthropic's form, whose answers leave out reasoning that is not wanted."""

    may_reason = True


class CountTokensRequest(ConvertedRequest):
    """The body of POST /v1/messages/count_tokens."""

    chat = MessagesChat
    names: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    neutral: ClassVar = {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()}

    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: TextOr[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None
    """What `output_config.format` was called before."""

    def chat_fields(self) -> dict[str, Any]:
        given = self.system
        if given is not None and not isinstance(given, str):
            given = [block for block in given if not block.text.startswith(_BILLING)]
        system = [{"role": "system", "content": text_of(given)}] if given else []
        choice = self.tool_choice or AnyChoice(type="auto")
        single = choice.disable_parallel_tool_use
        return {
            "messages": system + messages_of(self.messages),
            # The beginning of the answer, which is called prefill.
            "continue_final_message": self.messages[-1].role == "assistant",
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ToolChoice)
            else {"any": "required"}.get(choice.type, choice.type),
            "parallel_tool_calls": None if single is None else not single,
            "reasoning_effort": self._effort(),
            "response_format": self._format(),
        }

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        wanted = self.output_config.effort if self.output_config else None
        return "medium" if wanted is None and self.thinking is not None else wanted

    def _format(self) -> dict[str, Any] | None:
        wanted = (self.output_config and self.output_config.format) or self.output_format
        if wanted is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_, "strict": True}}


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    generates = True

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopStrings | None = None

    def chat_fields(self) -> dict[str, Any]:
        stops = [*self.stop, *(self.stop_sequences or ())]
        return {**super().chat_fields(), "max_completion_tokens": self.max_tokens, "stop": stops}


def _chat_tool(tool: Tool) -> dict[str, Any]:
    fields = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**fields, "parameters": tool.input_schema}}


def messages_of(turns: Sequence[MessageTurn]) -> list[dict[str, Any]]:
    """Turns as messages of a chat: the assistant's is one, and of a user's, each result of a tool is one.

    As Anthropic has it, turns of one role that follow each other are one.
    """
    messages: list[dict[str, Any]] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.blocks]
        messages += [_answer(blocks)] if role == "assistant" else _said(role, blocks)
    return messages


def _answer(blocks: Sequence[Block]) -> dict[str, Any]:
    content = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    calls = [chat_call(use.id, use.name, json.dumps(use.input, ensure_ascii=False)) for use in uses] or None
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _said(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The results, which the calls are before, and then the text."""
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return [*messages, {"role": role, "content": "\n".join(texts)}] if texts or not messages else messages
