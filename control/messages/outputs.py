"""From decode nodes to gateways: new tokens.

A step gives hundreds of requests a token each. So messages are columns, which are validated as a whole: a model for
each request and token takes twenty times as long.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from base.wire import Identifier, UInt, WireModel
from control.messages.common import DECODE, Message, TokenId
from control.prompt_logprobs import PromptLogprobs

FinishReason = Literal["stop", "length", "abort", "lost", "error", "invalid"]
"""Why a request ended. abort: another node may do it. lost: the same, and this node fails with all of its requests.
error: it failed. invalid: no node can carry it out."""

DraftCounts = tuple[int, int]
"""Drafts that were verified, and those of them that were right."""

_INT = np.dtype("<i4")


class Token(NamedTuple):
    """A sampled token. `logprob` is None where none was asked for. top_logprobs: pairs of a token id and its own."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Output(NamedTuple):
    """New tokens of one request. start: index of the first one among the generated tokens, so that a loss shows.

    cached_tokens: tokens of the prompt that were not computed for this request. In the output with its first token and
    in its last one; 0 in others. prompt_logprobs: a piece of what was asked for. All pieces come before the first
    token, in outputs of their own. drafts: how many this node has verified for the request so far, and how many of them
    were right, if that is asked for.
    """

    request_id: str
    start: int
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    drafts: DraftCounts = (0, 0)


_DETAILS = Output._fields[3:]
_NO_DETAILS = Output("", 0)[3:]


class RowLogprob(WireModel):
    """The log probabilities of a token, as in Token."""

    logprob: float | None = None
    top_logprobs: tuple[tuple[TokenId, float], ...] = ()


class RowDetails(WireModel):
    """What a few outputs have in addition to token ids. Fields are as in Output.

    row: index of the output in the message. logprobs: of each token, or empty.
    """

    row: UInt
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: UInt = 0
    logprobs: tuple[RowLogprob, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    drafts: tuple[UInt, UInt] = (0, 0)

    @classmethod
    def of(cls, row: int, output: Output) -> Self | None:
        """None if the output has only token ids."""
        has_logprobs = any(token.logprob is not None or token.top_logprobs for token in output.tokens)
        if not has_logprobs and output[3:] == _NO_DETAILS:
            return None
        logprobs = [RowLogprob(logprob=token.logprob, top_logprobs=token.top_logprobs) for token in output.tokens]
        others: dict[str, Any] = dict(zip(_DETAILS, output[3:], strict=True))
        return cls(row=row, logprobs=tuple(logprobs) if has_logprobs else (), **others)

    def added_to(self, output: Output) -> Output:
        tokens = output.tokens
        if self.logprobs:
            tokens = tuple(
                Token(token.token_id, more.logprob, more.top_logprobs)
                for token, more in zip(tokens, self.logprobs, strict=True)
            )
        return output._replace(tokens=tokens, **{name: getattr(self, name) for name in _DETAILS})


class Outputs(Message, sent_by=DECODE):
    """Decode node to gateway: new tokens of its requests. One that ends a request is repeated until Ended.

    starts, counts: of each request's tokens. token_ids: of all requests, one after the other. All three are int32,
    little-endian, and not negative. details: by row, in order, each row at most once.
    """

    request_ids: tuple[Identifier, ...]
    starts: bytes
    counts: bytes
    token_ids: bytes
    details: tuple[RowDetails, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> Self:
        return cls.of_columns(
            [output.request_id for output in outputs],
            [output.start for output in outputs],
            [[token.token_id for token in output.tokens] for output in outputs],
            dict(enumerate(outputs)),
        )

    @classmethod
    def of_columns(
        cls, request_ids: Sequence[str], starts: Sequence[int], ids: Sequence[Sequence[int]], outputs: dict[int, Output]
    ) -> Self:
        """Without an object for each token. outputs: by row, in order, those that have more than token ids."""
        details = (RowDetails.of(row, output) for row, output in outputs.items())
        return cls(
            request_ids=tuple(request_ids),
            starts=_column(starts),
            counts=_column(list(map(len, ids))),
            token_ids=_column(list(chain.from_iterable(ids))),
            details=tuple(found for found in details if found is not None),
        )

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        starts, counts, token_ids = map(_ints, (self.starts, self.counts, self.token_ids))
        if not len(self.request_ids) == len(starts) == len(counts):
            raise ValueError("the columns differ in length")
        if int(counts.sum()) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens, where the counts have {int(counts.sum())}")
        if any(column.size and column.min() < 0 for column in (starts, counts, token_ids)):
            raise ValueError("a negative number in a column")
        before = -1
        for details in self.details:
            if not before < details.row < len(counts):
                raise ValueError(f"details of row {details.row} after row {before}, of {len(counts)} rows")
            if details.logprobs and len(details.logprobs) != counts[details.row]:
                raise ValueError(f"{len(details.logprobs)} log probabilities of {counts[details.row]} tokens")
            before = details.row
        return self

    def rows(self) -> Iterator[Output]:
        """The outputs, each as one object."""
        starts, stops = _ints(self.starts).tolist(), _ints(self.counts).cumsum().tolist()
        tokens = tuple(map(Token, _ints(self.token_ids).tolist()))
        details = {each.row: each for each in self.details}
        first = 0
        for row, (request_id, start, stop) in enumerate(zip(self.request_ids, starts, stops, strict=True)):
            output = Output(request_id, start, tokens[first:stop])
            first = stop
            yield details[row].added_to(output) if row in details else output


def _column(values: Sequence[int]) -> bytes:
    return np.array(values, _INT).tobytes()


def _ints(column: bytes) -> npt.NDArray[np.int32]:
    """Raises ValueError if the length is no multiple of 4."""
    return np.frombuffer(column, _INT)
