"""The text of one answer, made of its tokens as they arrive."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from control.messages import FinishReason, Token
from gateway.attempt import NewTokens
from gateway.detokenizer import Detokenizer, StopMatcher
from gateway.tokenizer import CheckpointTokenizer


@dataclass(frozen=True)
class Delta:
    """What new tokens add to an answer. The text of a token may come with a later delta than its id.

    offsets: where in the answer's text each token begins, counted with the stop string. first: as in NewTokens.
    """

    text: str
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    finish_reason: FinishReason | None
    first: bool = False


class Choice:
    """Detokenizes an answer and ends it at a stop string. A stop token is not part of the text."""

    def __init__(self, tokenizer: CheckpointTokenizer, stops: Sequence[str], stop_token_ids: Collection[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode, tokenizer.skips)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length = 0
        """Characters that the detokenizer has returned."""

    def push(self, new: NewTokens) -> Delta:
        """Text and tokens, cut after the token that completed a stop string."""
        text = ""
        offsets: list[int] = []
        for token in new.tokens:
            offsets.append(self._length)
            if token.token_id not in self._stop_token_ids:
                text += self._match(self._detokenizer.push(token.token_id))
            if self._matcher.matched:
                break
        finish_reason = new.finish_reason
        if finish_reason is not None and not self._matcher.matched:
            text += self._match(self._detokenizer.finish())
            text += self._matcher.finish()
        if self._matcher.matched:
            finish_reason = "stop"
        return Delta(text, new.tokens[: len(offsets)], tuple(offsets), finish_reason, new.first)

    def _match(self, text: str) -> str:
        self._length += len(text)
        return self._matcher.push(text)
