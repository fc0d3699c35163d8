"""Keeps the streamed tokens of one request, so that those which a gateway has missed can be sent again."""

import math
from array import array

from control.messages import Token


class StreamedTokens:
    """Tokens by index, in arrays: 20 bytes each and 12 for each alternative. As objects they would take kilobytes."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("d")
        """Not a number where none was asked for."""
        self._top_ids = array("i")
        self._top_logprobs = array("d")
        self._top_stops = array("q")
        """Where each token's alternatives end in _top_ids and _top_logprobs."""

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token: Token) -> None:
        self._ids.append(token.token_id)
        self._logprobs.append(math.nan if token.logprob is None else token.logprob)
        for token_id, logprob in token.top_logprobs:
            self._top_ids.append(token_id)
            self._top_logprobs.append(logprob)
        self._top_stops.append(len(self._top_ids))

    def between(self, start: int, stop: int) -> tuple[Token, ...]:
        """The tokens with an index in [start, stop) that there are."""
        return tuple(self._token(index) for index in range(start, min(stop, len(self))))

    def _token(self, index: int) -> Token:
        logprob = self._logprobs[index]
        top = slice(self._top_stops[index - 1] if index else 0, self._top_stops[index])
        return Token(
            token_id=self._ids[index],
            logprob=None if math.isnan(logprob) else logprob,
            top_logprobs=tuple(zip(self._top_ids[top], self._top_logprobs[top], strict=True)),
        )
