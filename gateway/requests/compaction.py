"""POST /v1/responses/compact: the model summarises a conversation, and an item with that stands for it afterwards."""

from typing import Any, ClassVar, Literal

from gateway.requests.body import TextOr
from gateway.requests.chat import ChatCompletionRequest, ConvertedRequest
from gateway.requests.responses import InputItem, messages_of

_ASK = (
    "Summarise the conversation so far for a reader who has nothing else and goes on with it. Keep what was asked and "
    "decided, facts, names, numbers, code and paths that matter, results of tools, and what is still to be done. Write "
    "the summary alone."
)


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
