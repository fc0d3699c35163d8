"""The text of one answer, made of its tokens as they arrive."""

from dataclasses import dataclass
from typing import NamedTuple

from control.messages import FinishReason, Output, Token
from control.prompt_logprobs import PromptLogprobTable
from gateway.detokenizer import StopMatcher
from gateway.tokenizer import CheckpointTokenizer


class Delta(NamedTuple):
    """What new tokens add to an answer. The text of a token may come with a later delta than its id.

    A named tuple, like whatever is made for each token: a frozen dataclass takes three times as long to make.

    offsets: where in the answer's text each token begins, counted with the stop string. first: the answer begins with
    these tokens; earlier ones came from a node that failed and no longer count. stop: the stop string that ended the
    answer. prompt: with the first tokens, the log probabilities of the prompt, if they were asked for.
    """

    text: str
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    finish_reason: FinishReason | None
    first: bool = False
    stop: str | None = None
    prompt: PromptLogprobTable | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the text of an answer is made of its tokens.

    stops: strings that end it. includes_stop: they are part of the text. min_tokens: before so many tokens nothing ends
    it. skipped: tokens that are not part of the text. prompt_only: it has no tokens. One was generated, since a decode
    node generates at least one.
    """

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    min_tokens: int = 0
    skipped: frozenset[int] = frozenset()
    prompt_only: bool = False


class Choice:
    """Detokenizes an answer and ends it at a stop string."""

    __slots__ = ("_detokenizer", "_length", "_matcher", "_min_tokens", "_prompt_only")

    def __init__(self, tokenizer: CheckpointTokenizer, options: TextOptions) -> None:
        self._prompt_only = options.prompt_only
        self._min_tokens = options.min_tokens
        self._detokenizer = tokenizer.detokenizer(options.skipped)
        self._matcher = StopMatcher(options.stops, options.includes_stop)
        self._length = 0
        """Characters that the detokenizer has returned."""

    def push(self, output: Output) -> Delta:
        """Text and tokens, cut after the token that completed a stop string. Outputs come in order, none twice."""
        if self._prompt_only:
            return Delta("", (), (), "length", output.start == 0)
        matcher = self._matcher
        text = ""
        offsets: list[int] = []
        for token in output.tokens:
            offsets.append(self._length)
            piece = self._detokenizer.push(token.token_id)
            self._length += len(piece)
            text += matcher.push(piece, output.start + len(offsets) >= self._min_tokens)
            if matcher.stop is not None:
                break
        finish_reason = output.finish_reason
        if finish_reason is not None and matcher.stop is None:
            piece = self._detokenizer.finish()
            self._length += len(piece)
            text += matcher.push(piece, ends=True)
            text += matcher.finish()
        if matcher.stop is not None:
            finish_reason = "stop"
        tokens = output.tokens[: len(offsets)]
        return Delta(text, tokens, tuple(offsets), finish_reason, output.start == 0, matcher.stop)
