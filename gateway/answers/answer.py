"""What the answers of OpenAI's endpoints have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import orjson

from gateway.answers.prompt import by_position
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.prepared import Prepared
from gateway.tokenizer import CheckpointTokenizer

_TEXT = "text of a choice"


class Answer(StreamedAnswer, ABC):
    """Renders the answers to one request. Counts their tokens, so each delta must be passed once, in order."""

    last_line = b"data: [DONE]\n\n"

    kind: str
    chunk_kind: str
    _with_logprobs: bool
    """Whether those of its tokens were asked for."""

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer) -> None:
        request = prepared.request
        self._head: Json = {"id": prepared.request_id, "created": int(time.time()), "model": model}
        self._count = len(prepared.branches)
        self._prompt_tokens = prepared.prompt_tokens
        self._completion_tokens = 0
        self._tokenizer = tokenizer
        self._token_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._prepared = prepared
        self._prompt_logprobs = request.prompt_logprobs
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)
        self._around_choice: dict[int, tuple[bytes, bytes]] = {}
        """By choice: see `_around`."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By choice whose text stays plain: what stands in front of and behind it, in a chunk with nothing else."""

    def whole(self, answers: Sequence[Sequence[Delta]], unused: Sequence[Sequence[Delta]] = ()) -> Json:
        """The answers to a request that does not stream. unused: others that were generated, which count, too."""
        self._completion_tokens += sum(len(delta.tokens) for deltas in unused for delta in deltas)
        choices = [self._choice(index, _joined(deltas), whole=True) for index, deltas in enumerate(answers)]
        return self._head | {"object": self.kind, "choices": choices, "usage": self._usage()}

    def begin(self) -> list[Json]:
        return [opening for index in range(self._count) if (opening := self.opening(index))]

    def more(self, index: int, delta: Delta) -> list[Json]:
        return [self._chunk([self._choice(index, delta, whole=False)])]

    def written(self, index: int, delta: Delta) -> bytes:
        """As `more`. Of a chunk with nothing but text, which most are, only the text is made anew."""
        around = self._around_text.get(index)
        # A chunk without text may have another form.
        if around is None or not delta.text or delta.finish_reason is not None:
            return self._written_choice(index, delta)
        self._completion_tokens += len(delta.tokens)
        before, after = around
        return before + orjson.dumps(delta.text) + after

    def end(self) -> list[Json]:
        """The chunk with the usage, if the client asked for it."""
        return [self._chunk([]) | {"usage": self._usage()}] if self._include_usage else []

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def opening(self, index: int) -> Json | None:
        """The chunk of an answer before any text, if the format has one."""
        return None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_kind, "choices": choices}
        if self._usage_in_chunks:
            return chunk | {"usage": self._usage()}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, index: int, delta: Delta, whole: bool) -> Json:
        self._completion_tokens += len(delta.tokens)
        choice = _head(index, self._logprobs(index, delta), delta.finish_reason) | self._text(index, delta, whole)
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

    def _written_choice(self, index: int, delta: Delta) -> bytes:
        """As `more`. Of a chunk that has nothing beside what `_text` returns, only that is made anew."""
        if delta.finish_reason is not None or self._with_logprobs or self._token_ids or self._usage_in_chunks:
            return super().written(index, delta)
        self._completion_tokens += len(delta.tokens)
        before, after = self._around_choice.get(index) or self._around(index)
        text = orjson.dumps(self._text(index, delta, whole=False))[1:]
        if self._stays_plain(index):
            opening, _, closing = orjson.dumps(self._plain(_TEXT))[1:].partition(orjson.dumps(_TEXT))
            self._around_text[index] = before + opening, closing + after
        return before + text + after

    def _around(self, index: int) -> tuple[bytes, bytes]:
        """What stands in front of and behind what `_text` returns, in a chunk that has nothing beside it."""
        lines = self._line(self._chunk([_head(index) | {_TEXT: None}]))
        before, _, after = lines.partition(orjson.dumps({_TEXT: None})[1:])
        self._around_choice[index] = before, after
        return before, after

    def _by_position(self, index: int, first: Delta, alternatives: int) -> list[Json | None]:
        """The log probabilities of the prompt of a choice, which its first delta has."""
        assert first.prompt is not None, "they were asked for"
        return by_position(self._prepared.prompt_ids(index), first.prompt, alternatives, self._tokenizer)

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._prepared.cached_tokens},
        }

    @abstractmethod
    def _text(self, index: int, delta: Delta, whole: bool) -> Json:
        """The text of a choice, and what else depends on it. whole: rather than of a chunk."""

    @abstractmethod
    def _plain(self, text: str) -> Json:
        """What `_text` returns for a text that is not empty and is rendered as it is."""

    @abstractmethod
    def _stays_plain(self, index: int) -> bool:
        """Whether every text of a choice is rendered as it is from now on, up to the choice's last delta."""

    @abstractmethod
    def _logprobs(self, index: int, delta: Delta) -> Json | None:
        """The log probabilities of a choice, if they were asked for."""


def _head(index: int, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    """A choice without its text."""
    return {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}


def _joined(deltas: Sequence[Delta]) -> Delta:
    """A whole answer as one delta."""
    text = "".join(delta.text for delta in deltas)
    return Delta(
        text,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        # The text ends before the stop string, but offsets count it.
        offsets=tuple(min(offset, len(text)) for delta in deltas for offset in delta.offsets),
        finish_reason=deltas[-1].finish_reason,
        stop=deltas[-1].stop,
        prompt=deltas[0].prompt,
    )
