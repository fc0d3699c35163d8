"""The input of POST /v1/responses: its items, earlier answers included, and the messages of a chat that they become."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from gateway.requests.body import KindsOf, Piece, TextOr, text_of
from gateway.requests.chat import CallId, ToolName, chat_call


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
