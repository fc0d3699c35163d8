"""POST /v1/responses, without state: nothing is stored, so a conversation comes whole with each request."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import shown
from gateway.requests.body import FieldPolicy, JsonObject, KindsOf, Piece, RequestBody, TextOr, TextOrOther, text_of
from gateway.requests.chat import MAX_TOOLS, CallId, ConvertedRequest, ToolName, chat_call
from gateway.requests.generation import StreamOptions

LOGPROBS = "message.output_text.logprobs"
"""What `include` names when the client wants log probabilities."""
MAX_METADATA = 16
ResponseMetadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]


class InputText(Piece):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Piece):
    """A part of an earlier answer: the model refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[InputText | Refusal, KindsOf("a part of type input_text, output_text or refusal")]


class InputMessage(Piece):
    """A message of any role, earlier answers included."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[ContentPart]


class FunctionCall(Piece):
    """A call of an earlier answer. arguments: JSON text, as the model wrote it."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str


class FunctionCallOutput(Piece):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: TextOr[ContentPart]


class ReasoningText(Piece):
    """A part of the reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Piece):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return text_of(self.content or self.summary)


_SUMMARY = b"summary of hisparse-pd, version 1\n"
"""What the content of a compaction begins with. Every gateway of every service reads it."""


def encoded_summary(text: str) -> str:
    """The text as `encrypted_content`. It is encoded, not encrypted: its client has sent what it is made of."""
    return base64.b64encode(_SUMMARY + text.encode()).decode()


def _summary(content: str) -> str:
    try:
        decoded = base64.b64decode(content, validate=True)
        if decoded.startswith(_SUMMARY):
            return decoded.removeprefix(_SUMMARY).decode()
    except ValueError:
        pass
    raise PydanticCustomError("compaction", "expected what /v1/responses/compact made")


class Compaction(Piece):
    """What /v1/responses/compact made of an earlier part of the conversation. encrypted_content: decoded here."""

    type: Literal["compaction"]
    encrypted_content: Annotated[str, AfterValidator(_summary)]


InputItem = Annotated[
    InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem | Compaction,
    KindsOf(
        "a whole item (none is stored): message, function_call, function_call_output, reasoning or compaction",
        default="message",
    ),
]


class NamedFunction(Piece):
    """The one tool that is to be called."""

    type: Literal["function"]
    name: ToolName


class FunctionTool(NamedFunction):
    """A tool that the model may call. parameters: JSON schema of the arguments."""

    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


ToolChoice = TextOrOther[Literal["none", "auto", "required"], NamedFunction]


class Reasoning(Piece):
    """How much to reason. Summaries are not made: answers have the reasoning itself."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Piece):
    """Text without a form."""

    type: Literal["text"]


class JsonObjectFormat(Piece):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Piece):
    """JSON by a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[JsonObject, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, KindsOf("a format of type text, json_object or json_schema")
]


class ResponseText(Piece):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(ConvertedRequest):
    """The body of POST /v1/responses."""

    generates = True
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
    neutral: ClassVar = {"context_management": ([],), "generate": (True,), "moderation": (), "prompt": ()}

    input: TextOr[InputItem]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: ResponseText | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Of tools that the server runs, which there are none of."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: ResponseMetadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _input_is_complete(self) -> "ResponsesRequest":
        if not self.input:
            raise PydanticCustomError("input", "input: expected text or at least one item, found nothing")
        called: set[str] = set()
        for item in () if isinstance(self.input, str) else self.input:
            if isinstance(item, Compaction):
                # It may have the calls.
                break
            if isinstance(item, FunctionCall):
                called.add(item.call_id)
            elif isinstance(item, FunctionCallOutput) and item.call_id not in called:
                found = {"found": shown(item.call_id)}
                raise PydanticCustomError(
                    "call_id", "input: No tool call found for function call output {found}", found
                )
        return self

    def check_fields(self, policy: FieldPolicy) -> None:
        super().check_fields(policy)
        if self.stream_options is not None:
            self.stream_options.check_fields(policy)

    @property
    def with_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def given_tools(self) -> list[dict[str, Any]]:
        """The tools as answers repeat them."""
        # Without copies of the schemas, which may be large: this is done on the event loop.
        return [{name: getattr(tool, name) for name in FunctionTool.model_fields} for tool in self.tools or ()]

    def given_tool_choice(self) -> str | dict[str, Any]:
        """The choice as answers repeat it."""
        choice = self.tool_choice
        return {"type": "function", "name": choice.name} if isinstance(choice, NamedFunction) else choice or "auto"

    def given_text(self) -> dict[str, Any]:
        """The form of the text as answers repeat it."""
        wanted = self.text.format if self.text else None
        form: dict[str, Any] = {"type": "text"}
        if wanted is not None:
            named = {field.alias or name: getattr(wanted, name) for name, field in type(wanted).model_fields.items()}
            form = {name: value for name, value in named.items() if value is not None}
        verbosity = self.text.verbosity if self.text else None
        return {"format": form, "verbosity": verbosity or "medium"}

    def chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice
        return {
            "messages": messages_of(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedFunction)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs or None,
            "response_format": _chat_format(self.text.format if self.text else None),
            # As vLLM does: of a prompt that is too long, the end is kept.
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }


class ResponseCreate(RequestBody):
    """A message to the WebSocket of /v1/responses. Its other fields are those of a POST's body, and checked as such."""

    type: Literal["response.create"]
    input: TextOr[Any] = ""
    previous_response_id: str | None = None
    stream: Literal[True] | None = None

    def check_fields(self, policy: FieldPolicy) -> None:
        """The POST does that."""

    @property
    def items(self) -> list[Any]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": fields}


def _chat_format(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.model_dump(include={"name", "schema_", "description", "strict"}, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}
    return None if wanted is None else {"type": wanted.type}


def messages_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a chat: instructions, and then the items.

    Reasoning, text and calls that follow each other are one message, and so is all up to the results of the calls. The
    result of a call that a compaction has is the user's.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    answer: dict[str, Any] | None = None
    """The assistant's message that the next items may belong to."""
    called: set[str] = set()

    def begun(*after: str) -> dict[str, Any]:
        """The assistant's message; a new one if the last has no calls, and any of the fields `after` already."""
        nonlocal answer
        if answer is None or ("tool_calls" not in answer and any(field in answer for field in after)):
            answer = {"role": "assistant"}
            messages.append(answer)
        return answer

    def say(field: str, text: str, *after: str) -> None:
        begun(field, *after).setdefault(field, []).append(text)

    for item in items:
        match item:
            case ReasoningItem():
                say("reasoning_content", item.text, "content")
            case FunctionCall():
                call = chat_call(item.call_id, item.name, item.arguments)
                begun().setdefault("tool_calls", []).append(call)
                called.add(item.call_id)
            case FunctionCallOutput(call_id=call_id) if call_id in called:
                answer = None
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(item.output)})
            case FunctionCallOutput():
                answer = None
                content = f"The result of the call {item.call_id}:\n\n{text_of(item.output)}"
                messages.append({"role": "user", "content": content})
            case Compaction():
                answer = None
                content = f"A summary of the conversation until here:\n\n{item.encrypted_content}"
                messages.append({"role": "user", "content": content})
            case InputMessage(role="assistant"):
                say("content", text_of(item.content))
            case InputMessage():
                answer = None
                messages.append({"role": item.role, "content": text_of(item.content)})
    for message in messages:
        for field in ("reasoning_content", "content"):
            if isinstance(texts := message.get(field), list):
                message[field] = "\n".join(filter(None, texts))
    return messages
