"""The bytes that answers take in a gateway until their clients have them: of one request, and of all together."""

from collections.abc import Callable

from prometheus_client import Counter

from gateway.errors import ApiError


class HeldAnswers:
    """Counts the bytes of all answers, on the event loop. If they are too many, the request with the most ends."""

    def __init__(self, per_request: int, total: int, ended: Counter) -> None:
        """per_request, total: the most bytes, of one request and of all. ended: counts requests that end, by reason."""
        self._per_request = per_request
        self._total = total
        self._ended = ended
        self.held = 0
        self._leaving = 0
        """Those of them whose requests are about to end."""
        self._open: set[HeldBytes] = set()
        """Requests that are not about to end."""

    def account(self) -> "HeldBytes":
        """The account of one more request. It has to be closed."""
        account = HeldBytes(self)
        self._open.add(account)
        return account

    def add(self, account: "HeldBytes", size: int) -> None:
        """Count bytes; a negative size where less is held than before."""
        account.held += size
        self.held += size
        if account.error is not None:
            self._leaving += size

    def take(self, account: "HeldBytes", size: int) -> None:
        """Count bytes, unless this request ends: if it holds too much, or as the largest if all together do."""
        self.add(account, size)
        if account.held > self._per_request:
            text = (
                f"the answers take more than {self._per_request} bytes, the limit of one request: ask for fewer log "
                "probabilities (logprobs, top_logprobs), choices (n, best_of) or tokens, or stream"
            )
            self._end(account, "too_large", ApiError(400, text, code="answer_too_large"))
        if self.held - self._leaving > self._total:
            text = "this gateway holds as many bytes of answers as it may; try again later"
            error = ApiError(503, text, code="service_unavailable", retry_after=1.0)
            self._end(max(self._open, key=lambda each: each.held), "too_many_bytes", error)
        if account.error is not None:
            self.add(account, -size)

    def close(self, account: "HeldBytes") -> None:
        self.add(account, -account.held)
        self._open.discard(account)

    def _end(self, account: "HeldBytes", reason: str, error: ApiError) -> None:
        self._open.discard(account)
        account.error = error
        self._leaving += account.held
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
        if self.error is None:
            self._all.take(self, size)
        if self.error is not None:
            raise self.error

    def give(self, size: int) -> None:
        """Count bytes no longer."""
        self._all.add(self, -size)

    def settle(self, size: int) -> None:
        """Count this many bytes: the answers are complete. Raises ApiError if the request is to end."""
        self._all.add(self, size - self.held)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Forget the request: its answers are written or dropped."""
        self._all.close(self)
