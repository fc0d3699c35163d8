"""Where a request is in its grammar."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.grammar import GrammarError, GrammarViolation
from engine.grammar.proofs import PARSER_LIMITS
from engine.grammar.vocabulary import Vocabulary

_FAILURES = ("ParserTooComplex", "LexerTooComplex", "InternalError")


class CompiledGrammar:
    """A grammar that requests share. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """text: a proved grammar in llguidance's form. Takes milliseconds, without the interpreter's lock.

        Raises GrammarError.
        """
        self.vocabulary = vocabulary
        self._prototype = LLMatcher(vocabulary.library, text, log_level=0, limits=PARSER_LIMITS)
        if not self._prototype.is_error():
            # The first mask is the dearest. Copies find it ready.
            self._prototype.compute_bitmask()
        if error := self._prototype.get_error():
            raise GrammarError(error)

    def start(self, stop_token_ids: Sequence[int] = (), generated: Sequence[int] = ()) -> "GrammarState":
        """The state of a request with these generated tokens. stop_token_ids: empty for the checkpoint's.

        Raises GrammarViolation if the tokens do not fit.
        """
        state = GrammarState(self.vocabulary, self._prototype.deep_copy(), tuple(stop_token_ids))
        for token_id in generated:
            state.advance(token_id)
        return state


class GrammarState:
    """A request's place in its grammar: which tokens may come next.

    A stop token is allowed where the grammar may end, and moves nothing. One thread uses it.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, stop_token_ids: tuple[int, ...]) -> None:
        self.matcher = matcher
        self._vocabulary = vocabulary
        ends = tuple(i for i in stop_token_ids if i < vocabulary.vocab_size)
        self._stops, self._goes_on = ends or vocabulary.stop_token_ids, not ends
        self._foreign = [i for i in vocabulary.stop_token_ids if i not in self._stops]
        """The checkpoint's stop tokens that do not end this request."""

    @property
    def words(self) -> int:
        """int32 words of its masks."""
        return self._vocabulary.words

    @property
    def done(self) -> bool:
        """Whether nothing but a stop token can follow: the answer is complete, and the request may end at once."""
        return bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled. Raises GrammarViolation if the grammar does not allow it."""
        if token_id in self._stops and self.matcher.is_accepting():
            return
        if token_id in self._foreign or not self.matcher.consume_token(token_id):
            reason = self._error() or "it is no stop token"
            raise GrammarViolation(f"token {token_id} is not allowed by the request's grammar: {reason}")

    def try_draft(self, token_id: int) -> int | None:
        """Take a draft. Returns how many tokens `take_back` has to undo; None if no token follows the draft."""
        if token_id in self._stops and self._goes_on and self.matcher.is_accepting():
            return 0
        ends = token_id in self._stops or token_id in self._foreign or self.done
        return None if ends or not self.matcher.try_consume_tokens([token_id]) else 1

    def take_back(self, count: int) -> None:
        """Undo the last drafts."""
        if count and not self.matcher.rollback(count):
            raise GrammarViolation(f"{count} drafts cannot be taken back: {self._error()}")

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the mask of the next token. row: int32 [words], contiguous; bit i of word i // 32 allows token i.

        Raises GrammarViolation if no token can be allowed; the row then allows all.
        """
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.complete(row)

    def complete(self, row: npt.NDArray[np.int32]) -> None:
        """What `fill` does when llguidance has written its mask."""
        if (failure := self._failure()) is not None:
            row[:] = -1
            raise GrammarViolation(failure)
        np.bitwise_and(row, self._vocabulary.known, out=row)
        bits = row.view(np.uint32)
        first = self._vocabulary.stop_token_ids[0]
        if bits[first >> 5] >> (first & 31) & 1:
            for token_id in self._foreign:
                bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
            for token_id in self._stops:
                bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        elif not row.any():
            row[:] = -1
            raise GrammarViolation("the request's grammar cannot be continued by any token of the vocabulary")

    def _failure(self) -> str | None:
        if self.matcher.is_error():
            return f"the request's grammar failed: {self._error()}"
        if self.matcher.is_stopped() and (reason := self.matcher.stop_reason()) in _FAILURES:
            return f"the request's grammar became too complex to follow ({reason})"
        return None

    def _error(self) -> str:
        message = self.matcher.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "")
        return "; ".join(line.strip() for line in message.splitlines() if line.strip())


class FollowedDrafts:
    """Takes a request's state through its drafts and back."""

    def __init__(self, state: GrammarState, drafts: Sequence[int]) -> None:
        self.state = state
        self._drafts = drafts
        self._taken = self._moved = 0

    def follow(self, count: int) -> bool:
        """Take the drafts up to the first `count`, which no call may lower. Whether there are as many, and all fit."""
        if count > len(self._drafts):
            return False
        while self._taken < count and (moved := self.state.try_draft(self._drafts[self._taken])) is not None:
            self._taken, self._moved = self._taken + 1, self._moved + moved
        return self._taken == count

    def go_back(self) -> None:
        self.state.take_back(self._moved)
