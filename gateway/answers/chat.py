"""Answers of /v1/chat/completions."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from control.messages import Token
from gateway.answers.kept import KeptAnswer
from gateway.answers.openai import (
    TEXT,
    Choice,
    CompletionDetails,
    Head,
    OpenAIAnswer,
    PromptLogprobs,
    PromptTokenIds,
    Usage,
)
from gateway.answers.streamed import Column, Json
from gateway.attempt import Delta, EndReason
from gateway.formats.parsing import CallArguments, CallBegin, CallParser, ContentDelta, Event, ReasoningDelta
from gateway.requests.chat import ChatCompletionRequest


class ChosenFunction(TypedDict):
    """arguments: JSON text."""

    name: str
    arguments: str


class ChosenCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ChosenFunction


class AnswerMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[Annotated[str, Field(description="Where the model reasoned.")]]
    reasoning_content: NotRequired[Annotated[str, Field(description="The same, by its older name.")]]
    tool_calls: NotRequired[Annotated[list[ChosenCall], Field(description="Where the model calls tools.")]]


class TokenLogprob(TypedDict):
    """A token and its log probability. bytes: they may be a part of a character."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and others that were likely there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """By token of the answer, reasoning and calls included."""

    content: list[ChosenLogprob] | Column[ChosenLogprob]
    refusal: None


class ChatChoice(Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletion(Head):
    """The answers to a chat completion request."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[PromptTokenIds]


class ChatAnswer(OpenAIAnswer[ChatChoice]):
    """Reasoning, content and tool calls apart."""

    chunk_kind = "chat.completion.chunk"
    plain: ClassVar = {"delta": {"content": TEXT}}

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.prepared.request, ChatCompletionRequest)
        assert self.prepared.reading is not None
        self._reading = self.prepared.reading
        self._with_logprobs = bool(self.prepared.request.logprobs)
        self._parsers: dict[int, CallParser] = {}
        """By choice."""
        self._reasoning_tokens = 0

    def whole(self) -> ChatCompletion:
        whole: ChatCompletion = {
            "id": self._head["id"],
            "created": self._head["created"],
            "model": self._head["model"],
            "system_fingerprint": self._head["system_fingerprint"],
            "object": "chat.completion",
            "choices": self._whole_choices(),
            "usage": self._usage(),
        }
        if self._prompt_logprobs is not None:
            # All choices have the same prompt.
            whole["prompt_logprobs"] = Column(self._ranked_tokens(0, self._prompt_logprobs))
        if self._token_ids:
            whole["prompt_token_ids"] = Column(self.prepared.prompt_ids(0))
        return whole

    def _details(self) -> CompletionDetails:
        return {"reasoning_tokens": self._reasoning_tokens, **super()._details()}

    def begin(self) -> list[Json]:
        head = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        first, *others = [self._chunk([{"index": index, **head}]) for index in range(self._count)]
        if self._token_ids:
            first = {**first, "prompt_token_ids": self.prepared.prompt_ids(0)}
        return [first, *others]

    def _whole_choice(self, index: int, kept: KeptAnswer) -> ChatChoice:
        parts = self._parts(index, Delta(kept.text, (), tuple(kept.offsets), kept.finish_reason), whole=True)
        content = parts.pop("content", None if "tool_calls" in parts else "")
        for call in parts.get("tool_calls", ()):
            del call["index"]
        message = cast(AnswerMessage, {"role": "assistant", "content": content, "refusal": None, **parts})
        return {
            "index": index,
            "logprobs": {"content": kept.columns["content"], "refusal": None} if self._with_logprobs else None,
            "finish_reason": self._finished(index, kept.finish_reason),
            "message": message,
        }

    def _logprobs(self, index: int, delta: Delta) -> ChatLogprobs:
        return {"content": self._of_tokens(delta.tokens)["content"], "refusal": None}

    def _finished(self, index: int, reason: EndReason | None) -> Literal["stop", "length", "tool_calls"] | None:
        return "tool_calls" if reason == "stop" and self._parsers[index].called else reason

    def _ending(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """The reason comes after all that the message has: clients' helpers take what came before for complete."""
        if not choice["delta"]:
            return [choice]
        nothing: dict[str, Any] = {"delta": {}, "logprobs": None, "token_ids": []}
        return [
            {**choice, "finish_reason": None},
            {**choice, **{name: nothing[name] for name in nothing if name in choice}},
        ]

    def _text(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"delta": self._parts(index, delta, whole=False)}

    def _parts(self, index: int, delta: Delta, whole: bool) -> dict[str, Any]:
        """What a delta adds to a message. whole: the delta is the whole answer."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._reading.parser(whole)
        events = parser.push(delta.text) if delta.text else []
        self._reasoning_tokens += bisect_left(delta.offsets, parser.reasoned)
        if delta.finish_reason is not None:
            events += parser.finish()
        return _parts_of(events)

    def _stays_plain(self, index: int) -> bool:
        return self._parsers[index].only_content

    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        return {"content": [chosen_logprob(token, self._name, self.tokenizer.piece_bytes) for token in tokens]}


def chosen_logprob(token: Token, name: Callable[[int], str], bytes_of: Callable[[int], bytes]) -> ChosenLogprob:
    def named(token_id: int, logprob: float | None) -> TokenLogprob:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(bytes_of(token_id))}

    return {**named(token.token_id, token.logprob), "top_logprobs": [named(*other) for other in token.top_logprobs]}


def _parts_of(events: Sequence[Event]) -> dict[str, Any]:
    if len(events) == 1 and isinstance(events[0], ContentDelta):  # as of most tokens; patterns take four times as long
        return {"content": events[0].text}
    if len(events) == 1 and isinstance(events[0], ReasoningDelta):
        return _reasoning(events[0].text)
    texts: dict[str, str] = {}
    thoughts = ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                thoughts += text
            case ContentDelta(text):
                texts["content"] = texts.get("content", "") + text
            case CallBegin(index, call_id, name):
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    parts: dict[str, Any] = {**(_reasoning(thoughts) if thoughts else {}), **texts}
    return {**parts, "tool_calls": list(calls.values())} if calls else parts


def _reasoning(text: str) -> dict[str, Any]:
    """By both names that servers have for it."""
    return {"reasoning": text, "reasoning_content": text}
