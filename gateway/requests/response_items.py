"""The input items of POST /v1/responses, and the conversation that they are."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.requests.body import Piece, TextOr, kinds
from gateway.requests.chat import ToolName
from gateway.requests.generation import MAX_STOP_CHARS

CallId = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


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


ContentPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputText, Tag("<output_text>")]
    | Annotated[InputText, Tag("<text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    kinds("a part of type input_text, output_text or refusal"),
]


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
        return "\n".join(part.text for part in self.content or self.summary or ())


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    kinds("an item of type message, function_call, function_call_output or reasoning", default="message"),
]


def messages_of(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items as messages of a chat. Reasoning, text and calls that follow each other are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    """The assistant's message that the next items may belong to."""

    def begun(*after: str) -> dict[str, Any]:
        """The assistant's message; a new one if the last has any of the fields `after` already."""
        nonlocal answer
        if answer is None or any(field in answer for field in after):
            answer = {"role": "assistant"}
            messages.append(answer)
        return answer

    for item in items:
        match item:
            case ReasoningItem():
                begun("reasoning_content", "content", "tool_calls")["reasoning_content"] = item.text
            case FunctionCall():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                begun().setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                answer = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            case InputMessage(role="assistant"):
                begun("content", "tool_calls")["content"] = text_of(item.content)
            case InputMessage():
                answer = None
                messages.append({"role": item.role, "content": text_of(item.content)})
    return messages


def text_of(content: str | Sequence[InputText | Refusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
