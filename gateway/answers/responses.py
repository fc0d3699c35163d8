"""Answers of /v1/responses: a response with its output items, whole and in events."""

import time
import uuid

from control.messages import Token
from gateway.answers.blocks import Block, BlockReader, Change, Closed, Grew, Opened
from gateway.answers.kept import CHARACTER_BYTES, Column
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.requests.responses import ResponsesRequest
from gateway.tokenizer import CheckpointTokenizer

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


class ResponseAnswer(StreamedAnswer):
    """Items of reasoning, text and calls."""

    named = True

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        assert isinstance(prepared.source, ResponsesRequest)
        assert prepared.reading is not None
        self._prepared = prepared
        self._source = prepared.source
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._reading = prepared.reading
        self._held = held
        self._sequence = 0
        self._read_anew(whole=False)

    def _read_anew(self, whole: bool) -> None:
        self._reader = BlockReader(self._reading, whole)
        self._output_tokens = 0
        self._ids: list[str] = []
        """By block, the id of its item."""
        self._logprobs: dict[int, Column] = {}
        """By block of text. Streams repeat them at its end."""
        self._tokens = Column()
        """Log probabilities of tokens whose text is not there yet."""
        self.kept_bytes = 0

    def keep(self, index: int, delta: Delta) -> None:
        if delta.first:
            self._held.give(self.kept_bytes)
            self._read_anew(whole=True)
        for change in self._push(delta):
            self._note(change)

    def whole(self) -> Json:
        return self._final()

    def begin(self) -> list[Json]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def more(self, index: int, delta: Delta) -> list[Json]:
        return [event for change in self._push(delta) for event in self._events(change)]

    def end(self) -> list[Json]:
        response = self._final()
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", self._items()) | {"error": {"code": code, "message": error.message}}
        return [self._event("response.failed", response=response)]

    def _push(self, delta: Delta) -> list[Change]:
        self._output_tokens += len(delta.tokens)
        size = CHARACTER_BYTES * len(delta.text)
        if self._source.with_logprobs:
            before = len(self._tokens)
            self._tokens.extend(map(self._token, delta.tokens))
            size += len(self._tokens) - before
        self.kept_bytes += size
        self._held.take(size)
        return self._reader.push(delta)

    def _note(self, change: Change) -> Column:
        """Keep what a change brings beside text. Returns the log probabilities that belong to it."""
        block = change.block
        if isinstance(change, Opened):
            self._ids.append(_PREFIXES[block.kind] + uuid.uuid4().hex)
            self._logprobs[block.number] = Column()
        if not isinstance(change, Grew):
            return Column()
        tokens, self._tokens = self._tokens, Column()
        if block.kind != "text":
            return Column()
        self._logprobs[block.number].append_json(tokens.json)
        return tokens

    def _events(self, change: Change) -> list[Json]:
        tokens = self._note(change)
        block = change.block
        at: Json = {"output_index": block.number, "item_id": self._ids[block.number]}
        match change:
            case Opened():
                added = self._event(
                    "response.output_item.added", output_index=block.number, item=self._item(block, True)
                )
                if block.kind == "call":
                    return [added]
                part = self._part(block, Column(), "")
                return [added, self._event("response.content_part.added", **at, content_index=0, part=part)]
            case Grew() if block.kind == "call":
                return [self._event("response.function_call_arguments.delta", **at, delta=change.text)]
            case Grew():
                more: Json = {"logprobs": tokens} if block.kind == "text" else {}
                return [self._event(f"{_text_event(block)}.delta", **at, content_index=0, delta=change.text, **more)]
            case Closed():
                return [
                    *self._closing(block, at),
                    self._event("response.output_item.done", output_index=block.number, item=self._item(block)),
                ]

    def _closing(self, block: Block, at: Json) -> list[Json]:
        if block.kind == "call":
            done = "response.function_call_arguments.done"
            return [self._event(done, **at, name=block.name, arguments=block.text)]
        logprobs = self._logprobs[block.number]
        more: Json = {"logprobs": logprobs} if block.kind == "text" else {}
        part = self._part(block, logprobs, block.text)
        return [
            self._event(f"{_text_event(block)}.done", **at, content_index=0, text=block.text, **more),
            self._event("response.content_part.done", **at, content_index=0, part=part),
        ]

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _items(self) -> list[Json]:
        return [self._item(block) for block in self._reader.blocks]

    def _item(self, block: Block, begins: bool = False) -> Json:
        status = "in_progress" if begins else "completed" if block.complete else "incomplete"
        head: Json = {"id": self._ids[block.number], "status": status}
        if block.kind == "call":
            return head | {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                # A block may have grown since it began.
                "arguments": "" if begins else block.text,
            }
        content = [] if begins else [self._part(block, self._logprobs[block.number], block.text)]
        if block.kind == "text":
            return head | {"type": "message", "role": "assistant", "content": content}
        return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}

    def _part(self, block: Block, logprobs: Column, text: str) -> Json:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _token(self, token: Token) -> Json:
        top = [self._entry(*alternative) for alternative in token.top_logprobs]
        return self._entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        return {
            "token": self._tokenizer.piece(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.piece_bytes(token_id)),
        }

    def _final(self) -> Json:
        complete = self._reader.finish_reason == "stop"
        response = self._response("completed" if complete else "incomplete", self._items())
        if not complete:
            return response | {"incomplete_details": {"reason": "max_output_tokens"}}
        return response | {"completed_at": int(time.time())}

    def _response(self, status: str, output: list[Json]) -> Json:
        source, chat = self._source, self._prepared.request
        return {
            "id": self._prepared.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": source.instructions,
            "max_output_tokens": source.max_output_tokens,
            "max_tool_calls": source.max_tool_calls,
            "metadata": source.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": source.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": source.prompt_cache_key,
            "reasoning": {"effort": source.reasoning.effort if source.reasoning else None, "summary": None},
            "safety_identifier": source.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if chat.temperature is None else chat.temperature,
            "text": source.given_text(),
            "tool_choice": source.given_tool_choice(),
            "tools": source.given_tools(),
            "top_logprobs": source.top_logprobs or 0,
            "top_p": 1.0 if chat.top_p is None else chat.top_p,
            "truncation": source.truncation or "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": source.user,
        }

    def _usage(self) -> Json:
        prompt_tokens = self._prepared.prompt_tokens
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._prepared.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": prompt_tokens + self._output_tokens,
        }


def _text_event(block: Block) -> str:
    return "response.reasoning_text" if block.kind == "reasoning" else "response.output_text"
