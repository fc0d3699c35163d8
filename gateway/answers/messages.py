"""Answers of /v1/messages: Anthropic's."""

import hashlib
import json

from gateway.answers.blocks import Block, BlockReader, Change, Closed, Grew, Opened
from gateway.answers.kept import CHARACTER_BYTES
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.requests.messages import MessagesRequest
from gateway.tokenizer import CheckpointTokenizer


class MessageAnswer(StreamedAnswer):
    """Blocks of thinking, text and calls."""

    named = True

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        assert isinstance(prepared.source, MessagesRequest)
        assert prepared.reading is not None
        self._prepared = prepared
        self._model = model
        self._stops = prepared.source.stop_sequences or ()
        thinking = prepared.source.thinking
        self._shows_thinking = thinking is None or thinking.display != "omitted"
        self._reading = prepared.reading
        self._reader = BlockReader(prepared.reading, whole=False)
        self._held = held
        self._kept_bytes = 0
        self._output_tokens = 0
        self._pinged = False

    def keep(self, index: int, delta: Delta) -> None:
        if delta.first:
            self._reader = BlockReader(self._reading, whole=True)
            self._held.give(self._kept_bytes)
            self._kept_bytes = self._output_tokens = 0
        self._push(delta)
        size = CHARACTER_BYTES * len(delta.text)
        self._kept_bytes += size
        self._held.take(size)

    def whole(self) -> Json:
        return self._message([self._block(block) for block in self._reader.blocks])

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message([])}]

    def more(self, index: int, delta: Delta) -> list[Json]:
        events: list[Json] = []
        for change in self._push(delta):
            events += self._events(change)
            if not self._pinged:
                self._pinged = True
                events.append({"type": "ping"})
        return events

    def end(self) -> list[Json]:
        return [
            {"type": "message_delta", "delta": self._ending(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> list[Json]:
        return [error.anthropic_body()]

    def _push(self, delta: Delta) -> list[Change]:
        self._output_tokens += len(delta.tokens)
        return self._reader.push(delta)

    def _events(self, change: Change) -> list[Json]:
        block = change.block
        match change:
            case Opened():
                return [{"type": "content_block_start", "index": block.number, "content_block": self._empty(block)}]
            case Grew():
                delta = self._delta(block, change.text)
                return [] if delta is None else [self._block_delta(block, delta)]
            case Closed():
                stop = {"type": "content_block_stop", "index": block.number}
                if block.kind != "reasoning":
                    return [stop]
                return [self._block_delta(block, {"type": "signature_delta", "signature": _signature(block)}), stop]

    def _block_delta(self, block: Block, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": block.number, "delta": delta}

    def _empty(self, block: Block) -> Json:
        match block.kind:
            case "reasoning":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": "", "citations": None}
            case "call":
                return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}

    def _delta(self, block: Block, text: str) -> Json | None:
        match block.kind:
            case "reasoning":
                return {"type": "thinking_delta", "thinking": text} if self._shows_thinking else None
            case "text":
                return {"type": "text_delta", "text": text}
            case "call":
                return {"type": "input_json_delta", "partial_json": text}

    def _block(self, block: Block) -> Json:
        """A block of a whole answer, where calls are complete."""
        match block.kind:
            case "reasoning":
                thinking = block.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": thinking, "signature": _signature(block)}
            case "text":
                return {"type": "text", "text": block.text, "citations": None}
            case "call":
                return self._empty(block) | {"input": json.loads(block.text)}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._prepared.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._ending(),
            "usage": self._usage(),
        }

    def _ending(self) -> Json:
        """Why the answer ended; null while it goes on."""
        stop = self._reader.stop if self._reader.stop in self._stops else None
        match self._reader.finish_reason:
            case None:
                reason = None
            case "length":
                reason = "max_tokens"
            case _ if self._reader.called:
                reason, stop = "tool_use", None
            case _:
                reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> Json:
        cached = self._prepared.cached_tokens
        return {
            "input_tokens": self._prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
        }


def _signature(block: Block) -> str:
    """What stands where Anthropic signs its reasoning. Clients send it back, and nothing checks it."""
    return hashlib.sha256(block.text.encode()).hexdigest()
