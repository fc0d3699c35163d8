"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.requests.body import JsonObject, Piece, TextOr, kinds
from gateway.requests.chat import MAX_TOOLS, ToolName
from gateway.requests.conversion import ConvertedRequest
from gateway.requests.generation import MAX_STOP_CHARS, MAX_STOPS
from gateway.requests.message_blocks import MessageTurn, TextBlock, messages_of, text_of


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


Choice = Annotated[
    Annotated[AnyChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[AnyChoice, Tag("<none>")]
    | Annotated[ToolChoice, Tag("<tool>")],
    kinds("a choice of type auto, any, tool or none"),
]


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


class Metadata(Piece):
    """Whom a request is for."""

    user_id: str | None = None


class CountTokensRequest(ConvertedRequest):
    """The body of POST /v1/messages/count_tokens."""

    id_prefix = "msg_"
    names: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "thinking",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }
    neutral: ClassVar = {"container": (), "mcp_servers": ([],)}

    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: TextOr[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _the_last_turn_is_the_user_s(self) -> "CountTokensRequest":
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "prefill", "messages: expected the user's turn last; beginning the answer (prefill) is not supported"
            )
        return self

    def chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        choice, parallel = self.tool_choice, None
        chosen: Any = None
        if choice is not None:
            parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
            chosen = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
        if isinstance(choice, ToolChoice):
            chosen = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": system + [message for turn in self.messages for message in messages_of(turn)],
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": chosen,
            "parallel_tool_calls": parallel,
            "reasoning_effort": self._effort(),
            "response_format": self._format(),
        }

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        wanted = self.output_config.effort if self.output_config else None
        return "medium" if wanted is None and self.thinking is not None else "xhigh" if wanted == "max" else wanted

    def _format(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config else None
        if wanted is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_, "strict": True}}


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    service_tier: str | None = None

    def chat_fields(self) -> dict[str, Any]:
        stops = {} if self.stop_sequences is None else {"stop": self.stop_sequences}
        return {**super().chat_fields(), "max_completion_tokens": self.max_tokens, **stops}


def _chat_tool(tool: Tool) -> dict[str, Any]:
    fields = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**fields, "parameters": tool.input_schema}}
