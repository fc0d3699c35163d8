"""The text of one answer as it grows out of its tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from control.messages import FinishReason, Token
from gateway.detokenizer import Detokenizer, StopMatcher
from gateway.generation import Step
from gateway.tokenizer import CheckpointTokenizer


@dataclass(frozen=True)
class Delta:
    """What one step adds to an answer. The text of a token may come with a later delta than its id.

    `offsets`: where in the whole answer's text each token begins, a stop string included. `begins`: as of a Step.
    """

    text: str
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    finish_reason: FinishReason | None
    begins: bool = False


class Choice:
    """Detokenizes an answer and ends it at a stop string. The token that ended it early is not part of its text."""

    def __init__(self, tokenizer: CheckpointTokenizer, stops: Sequence[str], stop_token_ids: Collection[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode, tokenizer.skips)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length = 0
        """Characters that the detokenizer has given."""

    def push(self, step: Step) -> Delta:
        """The step's text and tokens, cut after the token that completed a stop string."""
        text = ""
        offsets: list[int] = []
        for token in step.tokens:
            offsets.append(self._length)
            if token.token_id not in self._stop_token_ids:
                text += self._match(self._detokenizer.push(token.token_id))
            if self._matcher.matched:
                break
        finish_reason = step.finish_reason
        if finish_reason is not None and not self._matcher.matched:
            text += self._match(self._detokenizer.finish())
            text += self._matcher.finish()
        if self._matcher.matched:
            finish_reason = "stop"
        return Delta(text, step.tokens[: len(offsets)], tuple(offsets), finish_reason, step.begins)

    def _match(self, text: str) -> str:
        self._length += len(text)
        return self._matcher.push(text)
