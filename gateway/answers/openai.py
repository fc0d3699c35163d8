"""What the answers of OpenAI's endpoints have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, NotRequired, TypeVar

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from control.messages import Token
from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.kept import KeptAnswer
from gateway.answers.streamed import Column, Json, StreamedAnswer
from gateway.attempt import Delta, EndReason
from gateway.errors import ApiError

TEXT = "text of a choice"
_TOKEN_IDS = "token_ids"
_TOKEN_ID_BYTES = 7
"""Of a prompt's token in JSON."""


class CompletionDetails(TypedDict):
    """reasoning_tokens: of the answers, those up to the end of the reasoning, in chats.

    accepted_prediction_tokens, rejected_prediction_tokens: drafts that were verified, with return_draft_counts.
    """

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class PromptDetails(TypedDict):
    """cached_tokens: of the prompt, those that did not have to be computed."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts over all prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[
        Annotated[CompletionDetails, Field(description="Of chats, and with return_draft_counts.")]
    ]


class RankedToken(TypedDict):
    """A token that could stand at a position of the prompt. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    Column[dict[str, RankedToken] | None],
    Field(
        description="With prompt_logprobs: by position, by token id, the prompt's token and the likeliest ones. "
        "Null for the first token."
    ),
]


PromptTokenIds = Annotated[list[int] | Column[int], Field(description="With return_token_ids: the prompt.")]


class Head(TypedDict):
    """What answers and chunks begin with. system_fingerprint: another one stands for another version or checkpoint."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Choice(TypedDict):
    """What choices of both endpoints have."""

    index: int
    token_ids: NotRequired[Annotated[list[int] | Column[int], Field(description="With return_token_ids.")]]
    stop_reason: NotRequired[
        Annotated[str | int | None, Field(description="The stop string, or token of stop_token_ids, that ended it.")]
    ]


_ChoiceT = TypeVar("_ChoiceT", bound=Choice)


class OpenAIAnswer(StreamedAnswer, ABC, Generic[_ChoiceT]):
    """Renders the choices of one request, and counts their tokens."""

    last_line = b"data: [DONE]\n\n"

    chunk_kind: ClassVar[str]
    plain: ClassVar[Json]
    """What `_text` returns for the text `TEXT`, if that is rendered as it is."""
    _with_logprobs: bool
    """Whether those of its tokens were asked for."""

    def __post_init__(self) -> None:
        prepared, request = self.prepared, self.prepared.request
        self._kept: dict[int, KeptAnswer] = {}
        """By number, answers that do not stream."""
        self._head: Head = {
            "id": prepared.request_id,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.tokenizer.system_fingerprint,
        }
        self._count = len(prepared.tokenized)
        self._completion_tokens = 0
        self._token_ids = bool(request.return_token_ids)
        self._name: Callable[[int], str] = (
            "token_id:{}".format if request.return_tokens_as_token_ids else self.tokenizer.piece
        )
        """How log probabilities name a token."""
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._prompt_logprobs = request.prompt_logprobs
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)
        self._around_choice: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the bytes around what `_text` returns, in a chunk with nothing else."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By choice whose text stays plain: the bytes around the text, in a chunk with nothing else."""

    def keep(self, index: int, delta: Delta) -> None:
        if delta.first:
            self._kept[index] = KeptAnswer()
            if self._token_ids:
                self.held.take(_TOKEN_ID_BYTES * len(self.prepared.tokenized[index].prompt_ids))
        columns: dict[str, list[Any]] = self._of_tokens(delta.tokens) if self._with_logprobs else {}
        if self._token_ids:
            columns[_TOKEN_IDS] = [token.token_id for token in delta.tokens]
        self.held.take(self._kept[index].add(delta, columns))

    def begin(self) -> list[Json]:
        return []

    def delta_events(self, index: int, delta: Delta) -> list[Json]:
        self._completion_tokens += len(delta.tokens)
        # Before the text, which takes an echo.
        logprobs = self._logprobs(index, delta) if self._with_logprobs else None
        text = self._text(index, delta)
        finish_reason = self._finished(index, delta.finish_reason)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason, **text}
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        choices = [choice]
        if finish_reason is not None:
            choices = self._ending(choice)
            choices[-1]["stop_reason"] = delta.stop
        return [self._chunk([each]) for each in choices]

    def encode_delta(self, index: int, delta: Delta) -> bytes:
        """Of a chunk with nothing but text, which most are, only the text is made anew."""
        around = self._around_text.get(index)
        # A chunk without text may have another form.
        if around is not None and delta.text and delta.finish_reason is None:
            self._completion_tokens += len(delta.tokens)
            before, after = around
            return before + orjson.dumps(delta.text) + after
        if delta.finish_reason is not None or self._with_logprobs or self._token_ids or self._usage_in_chunks:
            return super().encode_delta(index, delta)
        self._completion_tokens += len(delta.tokens)
        before, after = self._around_choice.get(index) or self._around(index)
        text = orjson.dumps(self._text(index, delta))[1:]
        if self._stays_plain(index):
            opening, _, closing = orjson.dumps(self.plain)[1:].partition(orjson.dumps(TEXT))
            self._around_text[index] = before + opening, closing + after
        return before + text + after

    def end(self) -> list[Json]:
        """The chunk with the usage, if the client asked for it."""
        return [{**self._chunk([]), "usage": self._usage()}] if self._include_usage else []

    def failed(self, error: ApiError) -> list[Json]:
        return [error.body()]

    def _chunk(self, choices: Sequence[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._usage_in_chunks:
            return {**chunk, "usage": self._usage()}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _whole_choices(self) -> list[_ChoiceT]:
        """Counts the tokens of all answers that were generated."""
        kept = [self._kept[number] for number in range(self._count)]
        self._completion_tokens += sum(answer.tokens for answer in kept)
        choices = []
        for index, answer in enumerate(self._given(kept)):
            choice = self._whole_choice(index, answer)
            choice["stop_reason"] = answer.stop
            if self._token_ids:
                choice["token_ids"] = answer.columns[_TOKEN_IDS]
            choices.append(choice)
        return choices

    def _around(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "logprobs": None, "finish_reason": None, TEXT: None}
        before, _, after = self._encode_event(self._chunk([choice])).partition(orjson.dumps({TEXT: None})[1:])
        self._around_choice[index] = before, after
        return before, after

    def _ranked_tokens(self, index: int, alternatives: int) -> Iterator[dict[str, RankedToken] | None]:
        """vLLM's `prompt_logprobs`: for each position, by token id, the prompt's token and the likeliest ones."""
        table = self._kept[self.prepared.first_choice(index)].prompt
        assert table is not None, "they were asked for"
        yield None
        for token in prompt_tokens(self.prepared.prompt_ids(index), table, alternatives):
            entries = [(token.token_id, token.logprob, token.rank)]
            entries += [(i, logprob, rank) for rank, (i, logprob) in enumerate(token.top, 1) if i != token.token_id]
            yield {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self.tokenizer.piece(token_id)}
                for token_id, logprob, rank in entries
            }

    def _usage(self) -> Usage:
        prompt_tokens = self.prepared.prompt_tokens
        usage: Usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.prepared.cached_tokens},
        }
        if details := self._details():
            usage["completion_tokens_details"] = details
        return usage

    def _details(self) -> CompletionDetails:
        if not self.prepared.request.return_draft_counts:
            return {}
        verified, right = self.prepared.drafts
        return {"accepted_prediction_tokens": right, "rejected_prediction_tokens": verified - right}

    def _ending(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """The last choice of a stream, as chunks have it."""
        return [choice]

    def _finished(self, index: int, reason: EndReason | None) -> str | None:
        return reason

    def _stays_plain(self, index: int) -> bool:
        """Whether every text of a choice is rendered as it is from now on, up to the choice's last delta."""
        return True

    @abstractmethod
    def _logprobs(self, index: int, delta: Delta) -> object:
        """Those of a choice of a chunk."""

    @abstractmethod
    def _whole_choice(self, index: int, kept: KeptAnswer) -> _ChoiceT:
        """A choice of a whole answer, without token ids and `stop_reason`."""

    @abstractmethod
    def _text(self, index: int, delta: Delta) -> Json:
        """Of a choice of a chunk, the text and what else depends on it."""

    def _given(self, kept: Sequence[KeptAnswer]) -> Sequence[KeptAnswer]:
        """Of each prompt those whose tokens are the likeliest on average, the best first."""
        computed, given = self.prepared.request.computed_choices, self.prepared.request.choices
        if computed == given:
            return kept
        prompts = [kept[start : start + computed] for start in range(0, len(kept), computed)]
        return [
            best
            for answers in prompts
            for best in sorted(answers, key=lambda answer: answer.average_logprob, reverse=True)[:given]
        ]

    @abstractmethod
    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Log probabilities: by name, what there is for each of these tokens."""


class PromptToken(NamedTuple):
    """A token of a prompt after the first. top: the likeliest tokens there, the likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def prompt_tokens(prompt_ids: Sequence[int], table: PromptLogprobTable, alternatives: int) -> Iterator[PromptToken]:
    """The tokens of a prompt after the first. alternatives: how many to report, at most as many as the table has."""
    ints, floats = table.ints[:, : 1 + alternatives].tolist(), table.floats[:, : 1 + alternatives].tolist()
    for token_id, (rank, *ids), (logprob, *logprobs) in zip(prompt_ids[1:], ints, floats, strict=True):
        yield PromptToken(token_id, logprob, rank, list(zip(ids, logprobs, strict=True)))
