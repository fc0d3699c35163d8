"""POST /v1/responses, without state: nothing is stored, so a conversation comes whole with each request."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.requests.body import TEXT_OR_OBJECT, JsonObject, Piece, TextOr, kinds
from gateway.requests.chat import MAX_TOOLS, ToolName
from gateway.requests.conversion import ConvertedRequest
from gateway.requests.generation import StreamOptions
from gateway.requests.response_items import InputItem, messages_of
from gateway.requests.unsupported import OF_STREAMS, FieldPolicy

LOGPROBS = "message.output_text.logprobs"
"""What `include` names when the client wants log probabilities."""
MAX_METADATA = 16


class FunctionTool(Piece):
    """A tool that the model may call. parameters: JSON schema of the arguments."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(Piece):
    """The one tool that is to be called."""

    type: Literal["function"]
    name: ToolName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedFunction, Tag("<object>")],
    TEXT_OR_OBJECT,
]


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
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    kinds("a format of type text, json_object or json_schema"),
]


class ResponseText(Piece):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(ConvertedRequest):
    """The body of POST /v1/responses."""

    id_prefix = "resp_"
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
    neutral: ClassVar = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
    }

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
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _input_is_not_empty(self) -> "ResponsesRequest":
        if not self.input:
            raise PydanticCustomError("input", "input: expected text or at least one item, found nothing")
        return self

    def check_fields(self, policy: FieldPolicy) -> None:
        super().check_fields(policy)
        if self.stream_options is not None:
            policy.check(self.stream_options.model_extra or {}, OF_STREAMS, "stream_options.")

    @property
    def with_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def given_tools(self) -> list[dict[str, Any]]:
        """The tools as answers repeat them."""
        return [tool.model_dump(include=set(FunctionTool.model_fields)) for tool in self.tools or ()]

    def given_tool_choice(self) -> str | dict[str, Any]:
        """The choice as answers repeat it."""
        choice = self.tool_choice
        return {"type": "function", "name": choice.name} if isinstance(choice, NamedFunction) else choice or "auto"

    def given_text(self) -> dict[str, Any]:
        """The form of the text as answers repeat it."""
        wanted = self.text.format if self.text else None
        form: dict[str, Any] = {"type": "text"}
        if wanted is not None:
            form = wanted.model_dump(include=set(type(wanted).model_fields), by_alias=True, exclude_none=True)
        verbosity = self.text.verbosity if self.text else None
        return {"format": form, "verbosity": verbosity or "medium"}

    def chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        return {
            "messages": system + messages_of(self.input),
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


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": fields}


def _chat_format(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if isinstance(wanted, JsonObjectFormat):
        return {"type": "json_object"}
    schema = {"name": wanted.name, "schema": wanted.schema_, "description": wanted.description, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
