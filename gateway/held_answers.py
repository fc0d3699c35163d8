"""The bytes that answers take in a gateway until their clients have them: of one request, and of all together."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from gateway.errors import ApiError


@dataclass(frozen=True)
class AnswerLimits:
    """Bytes of answers. per_request: of all answers to one request. total: of all requests."""

    per_request: int
    total: int


class HeldAnswers:
    """Counts the bytes of all answers. Belongs to the gateway's event loop.

    When they are too many, the request that holds the most ends, whichever asked for room: others go on.
    """

    def __init__(self, limits: AnswerLimits, ended: Counter) -> None:
        """ended: counts requests that end for what they hold, by reason."""
        self.limits = limits
        self._ended = ended
        self.held = 0
        self._leaving = 0
        """Those of them whose requests are about to end."""
        self._open: set[AnswerBytes] = set()
        """Requests that are not about to end."""

    def account(self) -> "AnswerBytes":
        """The account of one more request. It has to be closed."""
        account = AnswerBytes(self)
        self._open.add(account)
        return account

    def add(self, account: "AnswerBytes", size: int) -> None:
        """size: negative where less is held than before."""
        account.held += size
        self.held += size
        if account.error is not None:
            self._leaving += size

    def check(self, account: "AnswerBytes") -> ApiError | None:
        """End this request if it holds too much, or the largest if all together do. Returns why this one ends."""
        limits = self.limits
        if account.held > limits.per_request:
            text = (
                f"the answers take more than {limits.per_request} bytes, the limit of one request: ask for fewer log "
                "probabilities (logprobs, top_logprobs), choices (n, best_of) or tokens, or stream"
            )
            self._end(account, "too_large", ApiError(400, text, code="answer_too_large"))
        if self.held - self._leaving > limits.total:
            text = "this gateway holds as many bytes of answers as it may; try again later"
            error = ApiError(503, text, code="service_unavailable", retry_after=1.0)
            self._end(max(self._open, key=lambda each: each.held), "too_many_bytes", error)
        return account.error

    def close(self, account: "AnswerBytes") -> None:
        """Forget a request."""
        self.add(account, -account.held)
        self._open.discard(account)

    def _end(self, account: "AnswerBytes", reason: str, error: ApiError) -> None:
        self._open.discard(account)
        account.error = error
        self._leaving += account.held
        self._ended.labels(reason=reason).inc()
        if account.abort is not None:
            account.abort()


class AnswerBytes:
    """The bytes that the answers to one request take. Belongs to the gateway's event loop."""

    __slots__ = ("_all", "abort", "error", "held")

    def __init__(self, held_answers: HeldAnswers) -> None:
        self._all = held_answers
        self.held = 0
        self.error: ApiError | None = None
        """Why the request ends, once it or all together hold too much."""
        self.abort: Callable[[], object] | None = None
        """Ends a request that takes no more, as its answers are being sent."""

    def take(self, size: int) -> None:
        """Count bytes that are held from now on. Raises ApiError, and counts none, if the request is to end."""
        error = self.error
        if error is None:
            everything, limits = self._all, self._all.limits
            self.held += size
            everything.held += size
            if self.held <= limits.per_request and everything.held <= limits.total:
                return
            error = everything.check(self)
            if error is None:
                return
            everything.add(self, -size)
        raise error

    def give(self, size: int) -> None:
        """Count bytes no longer."""
        self._all.add(self, -size)

    def settle(self, size: int) -> None:
        """Count this many bytes: the answers are complete. Raises ApiError if the request is to end."""
        self._all.add(self, size - self.held)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """The answers are written or dropped."""
        self._all.close(self)
