"""The two response formats of the OpenAI API, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gateway.choice import Delta
from transfer.messages import Token

Json = dict[str, Any]


class ResponseFormat(ABC):
    """Renders one answer. Counts what it has rendered, so each delta is to be passed once, in order."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        piece: Callable[[int], str],
        *,
        logprobs: bool,
        token_ids: bool,
        include_usage: bool,
    ) -> None:
        self.request_id = request_id
        self._head: Json = {"id": request_id, "created": int(time.time()), "model": model}
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._piece = piece
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._include_usage = include_usage

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer to a request that does not stream."""
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        choice = self._choice(tokens, deltas[-1].finish_reason) | self._whole_text(text)
        return self._head | {"object": self.kind, "choices": [choice], "usage": self._usage()}

    def opening(self) -> Json | None:
        """The chunk that comes before any text, if the format has one."""
        return None

    def chunk(self, delta: Delta) -> Json:
        choice = self._choice(delta.tokens, delta.finish_reason) | self._chunk_text(delta.text)
        return self._chunk([choice])

    def usage_chunk(self) -> Json | None:
        """The last chunk, if the client asked for usage."""
        if not self._include_usage:
            return None
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, tokens: Sequence[Token], finish_reason: str | None) -> Json:
        self._completion_tokens += len(tokens)
        choice: Json = {
            "index": 0,
            "logprobs": self._render_logprobs(tokens) if self._logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    @abstractmethod
    def _whole_text(self, text: str) -> Json: ...

    @abstractmethod
    def _chunk_text(self, text: str) -> Json: ...

    @abstractmethod
    def _render_logprobs(self, tokens: Iterable[Token]) -> Json: ...


class CompletionFormat(ResponseFormat):
    kind = chunk_kind = "text_completion"
    _offset = 0

    def _whole_text(self, text: str) -> Json:
        return {"text": text}

    def _chunk_text(self, text: str) -> Json:
        return {"text": text}

    def _render_logprobs(self, tokens: Iterable[Token]) -> Json:
        rendered: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            piece = self._piece(token.token_id)
            rendered["tokens"].append(piece)
            rendered["token_logprobs"].append(token.logprob)
            rendered["top_logprobs"].append(self._alternatives(token))
            rendered["text_offset"].append(self._offset)
            self._offset += len(piece)
        return rendered

    def _alternatives(self, token: Token) -> dict[str, float | None]:
        """Log probabilities by text: the most probable tokens and the chosen one."""
        by_id = dict(token.top_logprobs) | {token.token_id: token.logprob}
        by_text: dict[str, float | None] = {}
        for token_id, logprob in by_id.items():
            piece = self._piece(token_id)
            # Several tokens may look alike, such as parts of characters.
            by_text[f"token_id:{token_id}" if piece in by_text else piece] = logprob
        return by_text


class ChatFormat(ResponseFormat):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _whole_text(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk_text(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _render_logprobs(self, tokens: Iterable[Token]) -> Json:
        return {
            "content": [
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(*alternative) for alternative in token.top_logprobs]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        piece = self._piece(token_id)
        return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}
