"""The bytes that answers take in a gateway until their clients have them: of one request, and of all together."""

from collections.abc import Callable

from prometheus_client import Counter

from gateway.errors import ApiError, unavailable


class HeldAnswers:
    """Counts the bytes of all answers, on the event loop. If they are too many, the request with the most ends."""

    def __init__(self, per_request: int, total: int, ended: Counter) -> None:
        """per_request, total: the most bytes, of one request and of all. ended: counts requests that end, by reason."""
        self._per_request = per_request
        self._total = total
        self._ended = ended
        self.held = 0
        self.leaving = 0
        """Those of them whose requests are about to end."""
        self.open: set[HeldBytes] = set()
        """Requests that are not about to end."""

    def account(self) -> "HeldBytes":
        """The account of one more request. It has to be closed."""
        account = HeldBytes(self)
        self.open.add(account)
        return account

    def ending(self, account: "HeldBytes") -> ApiError | None:
        """Ends a request that holds too much, and the largest one if all together do. Returns why this one ends."""
        if account.held > self._per_request:
            text = (
                f"the answers take more than {self._per_request} bytes, the limit of one request: ask for fewer log "
                "probabilities (logprobs, top_logprobs), choices (n, best_of) or tokens, or stream"
            )
            self._end(account, "too_large", ApiError(400, text, code="answer_too_large"))
        if self.held - self.leaving > self._total:
            error = unavailable("this gateway holds as many bytes of answers as it may; try again later")
            self._end(max(self.open, key=lambda each: each.held), "too_many_bytes", error)
        return account.error

    def _end(self, account: "HeldBytes", reason: str, error: ApiError) -> None:
        self.open.discard(account)
        account.error = error
        self.leaving += account.held
        self._ended.labels(reason=reason).inc()
        if account.abort is not None:
            account.abort()


class HeldBytes:
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
            self.add(size)
            error = self._all.ending(self)
            if error is None:
                return
            self.add(-size)
        raise error

    def add(self, size: int) -> None:
        """Count bytes, whatever the limits; a negative size where less is held than before."""
        self.held += size
        self._all.held += size
        if self.error is not None:
            self._all.leaving += size

    def settle(self, size: int) -> None:
        """Count this many bytes: the answers are complete. Raises ApiError if the request is to end."""
        self.add(size - self.held)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.add(-self.held)
        self._all.open.discard(self)
