"""The text of one answer as it grows out of its tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer, StopMatcher
from gateway.generation import Step
from gateway.tokenizer import CheckpointTokenizer
from transfer.messages import FinishReason, Token


@dataclass(frozen=True)
class Delta:
    """What one step adds to an answer. The text of a token may come with a later delta than its id.

    `begins`: as of a Step.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    begins: bool = False


class Choice:
    """Detokenizes an answer and ends it at a stop string. The token that ended it early is not part of its text."""

    def __init__(self, tokenizer: CheckpointTokenizer, stops: Sequence[str], stop_token_ids: Collection[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode, tokenizer.skips)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)

    def push(self, step: Step) -> Delta:
        """The step's text and tokens, cut after the token that completed a stop string."""
        text = ""
        for count, token in enumerate(step.tokens, start=1):
            if token.token_id in self._stop_token_ids:
                continue
            text += self._matcher.push(self._detokenizer.push(token.token_id))
            if self._matcher.matched:
                return Delta(text, step.tokens[:count], "stop", step.begins)
        if step.finish_reason is None:
            return Delta(text, step.tokens, None, step.begins)
        text += self._matcher.push(self._detokenizer.finish())
        if self._matcher.matched:
            return Delta(text, step.tokens, "stop", step.begins)
        return Delta(text + self._matcher.finish(), step.tokens, step.finish_reason, step.begins)
