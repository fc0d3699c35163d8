"""POST /v1/chat/completions, and bodies of endpoints that are answered by way of a chat completion."""

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import shown
from gateway.formats.conversation import PromptEnd
from gateway.formats.tools import CallRules, ToolSet
from gateway.requests.body import OF_MESSAGES, FieldPolicy, JsonObject, Piece, RequestBody, TextOrOther, parse
from gateway.requests.generation import MAX_STOP_CHARS, MAX_STOPS, CommonFields, GenerationRequest

MAX_TOOLS = 512
TemplateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
TemplateValue = bool | int | float | Annotated[str, Field(max_length=MAX_STOP_CHARS)] | None
"""Switches for a chat template. Structures are refused: templates are not written to be safe with them."""
TemplateVariables = Annotated[dict[TemplateName, TemplateValue], Field(max_length=MAX_STOPS)]

CallId = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


def _content(value: object) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": "" if value is None else value}]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            found = f", found one of type {shown(kind)}" if isinstance(kind, str) and kind != "text" else ""
            raise PydanticCustomError("content_type", f"expected a string or a list of parts of type 'text'{found}")
        texts.append(text)
    return "\n".join(texts)


class TextPart(Piece):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Piece):
    """What a call of an earlier answer called. arguments: JSON text, as the model wrote it."""

    name: ToolName
    arguments: str | None = ""


class ToolCall(Piece):
    """A call of an earlier answer."""

    id: CallId
    type: Literal["function"] | None = "function"
    function: CalledFunction


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A `ToolCall`, before it is validated."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatMessage(Piece):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None)] = ""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def rendered(self) -> dict[str, Any]:
        rendered: dict[str, Any] = {"role": self.role, "content": self.content}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        for name, value in (("name", self.name), ("reasoning_content", reasoning), ("tool_call_id", self.tool_call_id)):
            if value is not None:
                rendered[name] = value
        if self.tool_calls:
            calls = [chat_call(call.id, call.function.name, call.function.arguments or "") for call in self.tool_calls]
            rendered["tool_calls"] = calls
        return rendered


class FunctionDefinition(Piece):
    """parameters: JSON schema of the arguments."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDefinition(Piece):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def rendered(self) -> dict[str, Any]:
        return self.model_dump(include={"type", "function"}, exclude_none=True)


class _NamedFunction(Piece):
    name: ToolName


class NamedTool(Piece):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: _NamedFunction


ToolChoice = TextOrOther[Literal["none", "auto", "required"], NamedTool]


class ChatPromptFields(Piece):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _end_in_one_way(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message", "continue_final_message: not together with add_generation_prompt"
            )
        return self

    @property
    def prompt_end(self) -> PromptEnd:
        if self.continue_final_message:
            return PromptEnd.OPEN_MESSAGE
        return PromptEnd.LAST_MESSAGE if self.add_generation_prompt is False else PromptEnd.NEW_ANSWER


class ChatCompletionRequest(GenerationRequest, ChatPromptFields):
    """The body of POST /v1/chat/completions."""

    prompt_field = "messages"
    default_tokens: ClassVar[int | None] = None
    may_reason: ClassVar = False
    """Whether a model that cannot but reason does so even if it is not to."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs: only allowed when logprobs is true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "tools: expected each name once")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (wanted is not None and wanted not in names) or (self.tool_choice == "required" and not names):
            raise PydanticCustomError("tool_choice", "tool_choice: expected one of the tools, or tools to choose from")
        return self

    def check_fields(self, policy: FieldPolicy) -> None:
        super().check_fields(policy)
        for index, message in enumerate(self.messages):
            policy.check(message.model_extra or {}, OF_MESSAGES, f"messages.{index}.")

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else [tool.rendered() for tool in self.tools or ()]

    def call_rules(self) -> CallRules:
        tools, choice = self.usable_tools, self.tool_choice
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            return CallRules(ToolSet(named), forced=True, parallel=False)
        return CallRules(
            ToolSet(tools),
            forced=choice == "required",
            parallel=self.parallel_tool_calls is not False,
            strict=frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict")),
        )

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason first; None: as the checkpoint does by default."""
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_PASSED_ON = {*CommonFields.model_fields, "chat_template_kwargs"}


class ConvertedRequest(RequestBody, CommonFields, ABC):
    """The body of an endpoint that is answered by way of a chat completion."""

    chat: ClassVar[type[ChatCompletionRequest]] = ChatCompletionRequest
    """The class of that."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """The body of the chat completion, without `model`, `stream` and the fields that have the same name."""

    def generation(self, policy: FieldPolicy) -> ChatCompletionRequest:
        """The chat completion that the body asks for. Raises ApiError for what that refuses, too."""
        fields = {name: getattr(self, name) for name in _PASSED_ON & self.model_fields_set}
        asked = {"model": self.model, "stream": self.stream, **fields, **self.chat_fields()}
        return parse(self.chat, asked, policy)
