"""POST /v1/responses, without state: nothing is stored, so a conversation comes whole with each request.

POST /v1/responses/compact: the model summarises a conversation, and an item with that stands for it afterwards.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import shown
from gateway.requests.body import FieldPolicy, JsonObject, KindsOf, Piece, RequestBody, TextOr, TextOrOther
from gateway.requests.chat import MAX_TOOLS, ChatCompletionRequest, ConvertedRequest, ToolName
from gateway.requests.generation import StreamOptions
from gateway.requests.response_input import Compaction, FunctionCall, FunctionCallOutput, InputItem, messages_of

LOGPROBS = "message.output_text.logprobs"
"""What `include` names when the client wants log probabilities."""
MAX_METADATA = 16
_ASK = (
    "Summarise the conversation so far for a reader who has nothing else and goes on with it. Keep what was asked and "
    "decided, facts, names, numbers, code and paths that matter, results of tools, and what is still to be done. Write "
    "the summary alone."
)
ResponseMetadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
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
        text = self.text or ResponseText()
        wanted = text.format or TextFormat(type="text")
        named = {field.alias or name: getattr(wanted, name) for name, field in type(wanted).model_fields.items()}
        form = {name: value for name, value in named.items() if value is not None}
        return {"format": form, "verbosity": text.verbosity or "medium"}

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


class SummaryRequest(ChatCompletionRequest):
    """The chat that makes a summary, which has as many tokens as the context has room for, up to a limit."""

    default_tokens = 8192


class CompactRequest(ConvertedRequest):
    """The body of POST /v1/responses/compact."""

    generates = True
    names: ClassVar = {"messages": "input"}
    chat = SummaryRequest

    model: str
    input: TextOr[InputItem]
    instructions: str | None = None
    stream: Literal[False] | None = None

    def chat_fields(self) -> dict[str, Any]:
        return {"messages": [*messages_of(self.instructions, self.input), {"role": "user", "content": _ASK}]}
