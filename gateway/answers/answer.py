"""What the answers of OpenAI's endpoints have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import orjson

from control.messages import Token
from gateway.answers.kept import Column, KeptAnswer
from gateway.answers.prompt import by_position
from gateway.answers.streamed import Json, StreamedAnswer
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.tokenizer import CheckpointTokenizer

_TEXT = "text of a choice"
_TOKEN_IDS = "token_ids"


class Answer(StreamedAnswer, ABC):
    """Renders the answers to one request. Counts their tokens, so each delta must be passed once, in order."""

    last_line = b"data: [DONE]\n\n"

    kind: str
    chunk_kind: str
    _with_logprobs: bool
    """Whether those of its tokens were asked for."""

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        request = prepared.request
        self._held = held
        self._kept: dict[int, KeptAnswer] = {}
        """By number, answers that do not stream."""
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

    def keep(self, index: int, delta: Delta) -> None:
        if delta.first:
            if index in self._kept:
                self._held.give(self._kept[index].size)
            self._kept[index] = KeptAnswer()
        columns: dict[str, list[object]] = self._of_tokens(delta.tokens) if self._with_logprobs else {}
        if self._token_ids:
            columns[_TOKEN_IDS] = [token.token_id for token in delta.tokens]
        self._held.take(self._kept[index].add(delta, columns))

    def whole(self) -> Json:
        kept = [self._kept[number] for number in range(self._count)]
        self._completion_tokens += sum(answer.tokens for answer in kept)
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(self._given(kept))]
        return self._head | {"object": self.kind, "choices": choices, "usage": self._usage()}

    def begin(self) -> list[Json]:
        return [opening for index in range(self._count) if (opening := self.opening(index))]

    def more(self, index: int, delta: Delta) -> list[Json]:
        return [self._chunk([self._choice(index, delta)])]

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

    def _choice(self, index: int, delta: Delta) -> Json:
        self._completion_tokens += len(delta.tokens)
        logprobs = self._logprobs(index, delta) if self._with_logprobs else None
        choice = _head(index, logprobs, delta.finish_reason) | self._text(index, delta, whole=False)
        if self._token_ids:
            choice[_TOKEN_IDS] = [token.token_id for token in delta.tokens]
        return choice

    def _whole_choice(self, index: int, kept: KeptAnswer) -> Json:
        logprobs = self._whole_logprobs(index, kept) if self._with_logprobs else None
        delta = Delta(kept.text, (), (), kept.finish_reason)
        choice = _head(index, logprobs, kept.finish_reason) | self._text(index, delta, whole=True)
        return choice | {_TOKEN_IDS: kept.columns[_TOKEN_IDS]} if self._token_ids else choice

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

    def _by_position(self, index: int, kept: KeptAnswer, alternatives: int) -> Column:
        """The log probabilities of the prompt of a choice."""
        assert kept.prompt is not None, "they were asked for"
        return Column(by_position(self._prepared.prompt_ids(index), kept.prompt, alternatives, self._tokenizer))

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

    def _given(self, kept: Sequence[KeptAnswer]) -> Sequence[KeptAnswer]:
        """The answers that are given, of all that were generated."""
        return kept

    @abstractmethod
    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[object]]:
        """Log probabilities: by name, what there is for each of these tokens."""

    @abstractmethod
    def _logprobs(self, index: int, delta: Delta) -> Json:
        """The log probabilities of a choice, in a chunk."""

    @abstractmethod
    def _whole_logprobs(self, index: int, kept: KeptAnswer) -> Json:
        """The log probabilities of a whole choice."""


def _head(index: int, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    """A choice without its text."""
    return {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
