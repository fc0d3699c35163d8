"""POST /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from control.messages import TokenId
from gateway.requests.body import FieldPolicy, RequestBody
from gateway.requests.chat import MAX_TOOLS, ChatMessage, ChatPromptFields, ToolDefinition


class TokenizeRequest(RequestBody, ChatPromptFields):
    """The body of POST /tokenize: text, or a conversation, which becomes a prompt by the model's chat format.

    add_special_tokens: such as a begin of sequence; by default in front of a text, and not in front of a conversation,
    where the chat format writes its own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "prompt: expected either prompt or messages")
        if self.prompt is not None and self.continue_final_message:
            raise PydanticCustomError("continue_final_message", "continue_final_message: expected messages to continue")
        return self


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

    def check_fields(self, policy: FieldPolicy) -> None:
        policy.check(self.model_extra or {}, {})
