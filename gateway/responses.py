"""The two response formats of OpenAI's API, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from control.messages import Token
from gateway.api import GenerationRequest
from gateway.attempt import TokenizedRequest
from gateway.choice import Delta
from gateway.tokenizer import CheckpointTokenizer

Json = dict[str, Any]


class ResponseFormat(ABC):
    """Renders one answer. Counts the tokens that it renders, so each delta must be passed once, in order."""

    kind: str
    chunk_kind: str

    def __init__(
        self, request: GenerationRequest, tokenized: TokenizedRequest, model: str, tokenizer: CheckpointTokenizer
    ) -> None:
        self.request_id = tokenized.request_id
        self._head: Json = {"id": self.request_id, "created": int(time.time()), "model": model}
        self._prompt_tokens = len(tokenized.prompt_ids)
        self._completion_tokens = 0
        self._tokenizer = tokenizer
        self._logprobs = tokenized.sampling.top_logprobs is not None
        self._token_ids = bool(request.return_token_ids)
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The answer to a request that does not stream."""
        text = "".join(delta.text for delta in deltas)
        answer = Delta(
            text,
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            # The text ends before the stop string, but offsets count it.
            offsets=tuple(min(offset, len(text)) for delta in deltas for offset in delta.offsets),
            finish_reason=deltas[-1].finish_reason,
        )
        return self._head | {"object": self.kind, "choices": [self._choice(answer, whole=True)], "usage": self._usage()}

    def opening(self) -> Json | None:
        """The chunk before any text, if the format has one."""
        return None

    def chunk(self, delta: Delta) -> Json:
        return self._chunk([self._choice(delta, whole=False)])

    def usage_chunk(self) -> Json | None:
        """The last chunk, if the client asked for usage."""
        if not self._include_usage:
            return None
        return self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, delta: Delta, whole: bool) -> Json:
        self._completion_tokens += len(delta.tokens)
        choice: Json = {
            "index": 0,
            "logprobs": self._render_logprobs(delta) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            **self._text(delta.text, whole),
        }
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    @abstractmethod
    def _text(self, text: str, whole: bool) -> Json:
        """The text of a choice. whole: rather than of a chunk."""

    @abstractmethod
    def _render_logprobs(self, delta: Delta) -> Json: ...


class CompletionFormat(ResponseFormat):
    kind = chunk_kind = "text_completion"

    def _text(self, text: str, whole: bool) -> Json:
        return {"text": text}

    def _render_logprobs(self, delta: Delta) -> Json:
        return {
            "tokens": [self._tokenizer.piece(token.token_id) for token in delta.tokens],
            "token_logprobs": [token.logprob for token in delta.tokens],
            "top_logprobs": [self._alternatives(token) for token in delta.tokens],
            "text_offset": list(delta.offsets),
        }

    def _alternatives(self, token: Token) -> dict[str, float | None]:
        """Log probabilities by text: the most probable tokens and the chosen one."""
        by_id = dict(token.top_logprobs) | {token.token_id: token.logprob}
        by_text: dict[str, float | None] = {}
        for token_id, logprob in by_id.items():
            piece = self._tokenizer.piece(token_id)
            # Several tokens may have the same text, such as parts of characters.
            by_text[f"token_id:{token_id}" if piece in by_text else piece] = logprob
        return by_text


class ChatFormat(ResponseFormat):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _text(self, text: str, whole: bool) -> Json:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _render_logprobs(self, delta: Delta) -> Json:
        return {
            "content": [
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(*alternative) for alternative in token.top_logprobs]}
                for token in delta.tokens
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        return {
            "token": self._tokenizer.piece(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.piece_bytes(token_id)),
        }
