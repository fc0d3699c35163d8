"""The text of one answer, made of its tokens as they arrive."""

from dataclasses import dataclass
from typing import NamedTuple

from control.messages import FinishReason, Token
from control.prompt_logprobs import PromptLogprobTable
from gateway.detokenizer import StopMatcher
from gateway.tokenizer import CheckpointTokenizer


class NewTokens(NamedTuple):
    """Tokens of an answer, in order and each once. The last ones come with a finish reason.

    A named tuple, like whatever is made for each token: a frozen dataclass takes three times as long to make.

    first: the answer begins with these tokens. Earlier ones came from a node that failed and no longer count.
    prompt: with the first tokens, the log probabilities of the prompt, if they were asked for. cached_tokens: with the
    first ones, tokens of the prompt that were not computed.
    """

    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None
    first: bool
    prompt: PromptLogprobTable | None = None
    cached_tokens: int = 0


class Delta(NamedTuple):
    """What new tokens add to an answer. The text of a token may come with a later delta than its id.

    offsets: where in the answer's text each token begins, counted with the stop string. first, prompt: as in
    NewTokens. stop: the stop string that ended the answer.
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

    stops: strings that end it. stop_token_ids: tokens that end it. includes_stop: these are part of the text.
    min_tokens: before so many tokens nothing ends it. skipped: special tokens that are not part of the text.
    prompt_only: it has no tokens. One was generated, since a decode node generates at least one.
    """

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    includes_stop: bool = False
    min_tokens: int = 0
    skipped: frozenset[int] = frozenset()
    prompt_only: bool = False


class Choice:
    """Detokenizes an answer and ends it at a stop string."""

    __slots__ = ("_detokenizer", "_length", "_matcher", "_options", "_tokens")

    def __init__(self, tokenizer: CheckpointTokenizer, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = tokenizer.detokenizer(options.skipped)
        self._matcher = StopMatcher(options.stops, options.includes_stop)
        self._tokens = 0
        self._length = 0
        """Characters that the detokenizer has returned."""

    def push(self, new: NewTokens) -> Delta:
        """Text and tokens, cut after the token that completed a stop string."""
        options, matcher = self._options, self._matcher
        if options.prompt_only:
            return Delta("", (), (), "length", new.first, prompt=new.prompt)
        text = ""
        offsets: list[int] = []
        for token in new.tokens:
            offsets.append(self._length)
            self._tokens += 1
            if options.includes_stop or token.token_id not in options.stop_token_ids:
                piece = self._detokenizer.push(token.token_id)
                self._length += len(piece)
                text += matcher.push(piece, ends=self._tokens >= options.min_tokens)
            if matcher.stop is not None:
                break
        finish_reason = new.finish_reason
        if finish_reason is not None and matcher.stop is None:
            piece = self._detokenizer.finish()
            self._length += len(piece)
            text += matcher.push(piece, ends=True)
            text += matcher.finish()
        if matcher.stop is not None:
            finish_reason = "stop"
        tokens = new.tokens[: len(offsets)]
        return Delta(text, tokens, tuple(offsets), finish_reason, new.first, matcher.stop, new.prompt)
