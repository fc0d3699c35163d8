"""Answers of /v1/chat/completions."""

from collections.abc import Sequence

from control.messages import Token
from gateway.answers.answer import Answer
from gateway.answers.kept import KeptAnswer
from gateway.answers.streamed import Json
from gateway.choice import Delta
from gateway.formats import CallArguments, CallBegin, CallEnd, CallParser, ContentDelta, Event, ReasoningDelta
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.requests.chat import ChatCompletionRequest
from gateway.tokenizer import CheckpointTokenizer


class ChatAnswer(Answer):
    """Reasoning, content and tool calls apart."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        super().__init__(prepared, model, tokenizer, held)
        assert isinstance(prepared.request, ChatCompletionRequest)
        assert prepared.reading is not None
        self._reading = prepared.reading
        self._with_logprobs = bool(prepared.request.logprobs)
        self._parsers: dict[int, CallParser] = {}
        """By choice."""
        self._called: set[int] = set()
        """Choices with a complete call."""

    def whole(self) -> Json:
        whole = super().whole()
        if self._prompt_logprobs is not None:
            # All choices have the same prompt.
            whole["prompt_logprobs"] = self._by_position(0, self._kept[0], self._prompt_logprobs)
        return whole

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _text(self, index: int, delta: Delta, whole: bool) -> Json:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._reading.parser(whole)
        events = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += parser.finish()
        for event in events:
            if isinstance(event, CallEnd):
                self._called.add(index)
        parts = _parts_of(events)
        rendered: Json = {"delta": parts}
        if whole:
            content = parts.pop("content", None if "tool_calls" in parts else "")
            for call in parts.get("tool_calls", ()):
                del call["index"]
            rendered = {"message": {"role": "assistant", "content": content, "refusal": None, **parts}}
        if delta.finish_reason == "stop" and index in self._called:
            rendered["finish_reason"] = "tool_calls"
        return rendered

    def _plain(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def _stays_plain(self, index: int) -> bool:
        return self._parsers[index].only_content

    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[object]]:
        return {
            "content": [
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(*alternative) for alternative in token.top_logprobs]}
                for token in tokens
            ]
        }

    def _logprobs(self, index: int, delta: Delta) -> Json:
        return {**self._of_tokens(delta.tokens), "refusal": None}

    def _whole_logprobs(self, index: int, kept: KeptAnswer) -> Json:
        return {"content": kept.columns["content"], "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        return {
            "token": self._tokenizer.piece(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.piece_bytes(token_id)),
        }


def _parts_of(events: Sequence[Event]) -> Json:
    """The events as one delta of a message."""
    if len(events) == 1 and isinstance(events[0], ContentDelta):  # as of most tokens; patterns take four times as long
        return {"content": events[0].text}
    texts: dict[str, str] = {}
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                texts["reasoning_content"] = texts.get("reasoning_content", "") + text
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
    return {**texts, "tool_calls": list(calls.values())} if calls else dict(texts)
