"""What a chat format is: it makes a prompt of a conversation, and reasoning, content and tool calls of an answer.

Messages and tools (`Tool`) are what OpenAI's chat API has, as plain mappings that somebody else has validated. A
message has `role` (system, developer, user, assistant or tool), `content` (a string or None), and where there is any
`reasoning_content`, `tool_calls` ([{"id", "type": "function", "function": {"name", "arguments": JSON text}}]) and
`tool_call_id`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gateway.formats.tools import Tool, ToolSet

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call whose name is one of the request's tools. index: 0, 1, ... within the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments. The first piece begins with "{"."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete: its arguments, put together, are one JSON object.

    A call without this event was cut off or broke: its arguments are no JSON, because their end is missing.
    """

    index: int


Event: TypeAlias = ReasoningDelta | ContentDelta | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    text: up to where the model goes on, with the special tokens, so it is tokenized without adding any.
    reasoning: whether the model goes on inside its reasoning; the parser of the answer has to know it.
    """

    text: str
    reasoning: bool


class OutputParser(Protocol):
    """Takes the text of one answer apart. The pieces may be cut anywhere: the events mean the same.

    only_content: whatever is pushed from now on is content and comes back as it is, so it need not be pushed.
    """

    only_content: bool

    def push(self, text: str) -> list[Event]:
        """What has become certain with this text."""

    def finish(self) -> list[Event]:
        """What was held back, at the end of the answer. Nothing may be pushed afterwards."""


class FormatError(Exception):
    """A conversation, or calls, that the format cannot express. The message says why; the client is told it (400)."""


class ChatFormat(Protocol):
    """How one family of models writes conversations. Any thread may call it."""

    @property
    def name(self) -> str:
        """As in --tool-call-parser."""

    @property
    def begin_of_reasoning(self) -> str | None:
        """The text in front of reasoning; None: the format knows no reasoning."""

    @property
    def end_of_reasoning(self) -> str | None:
        """The text behind reasoning. A grammar begins behind it when `Prompt.reasoning` is true."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts of tokens that the parser looks for: the detokenizer must not skip them, special or not."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end every answer, beside the stop tokens of the checkpoint's configuration."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt. Raises FormatError for a conversation that cannot be rendered.

        thinking: whether the model is to reason first; None: the family's default.
        variables: chat_template_kwargs. `thinking` and `enable_thinking` among them win over the argument.
        """

    def parser(
        self,
        tools: ToolSet,
        *,
        reasoning: bool,
        whole_calls: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> OutputParser:
        """A parser of one answer.

        tools: those that may be called; none (also for tool_choice "none"): everything is text.
        reasoning: `Prompt.reasoning`.
        whole_calls: give a call only when it is complete. A call that breaks or is cut off is text then, as is right
            for answers that are not streamed. Otherwise arguments come piece by piece, and such a call stays as it is.
        new_id: names the calls; by default "call_" and random digits.
        """

    def call_grammar(
        self, tools: ToolSet, *, parallel: bool = True, token_ids: Mapping[str, int] | None = None
    ) -> str | None:
        """A grammar (llguidance's Lark) of an answer that is nothing but calls, for tool_choice required or named.

        It begins behind the reasoning, where there is any. Markers that are tokens are written as these.

        tools: those to choose from: all of them, or the one that is named. parallel: more than one call is allowed.
        token_ids: the tokenizer's added tokens, by their text. None: the format has no tool calls. Raises FormatError
            if the grammar would be longer than decode nodes take.
        """
