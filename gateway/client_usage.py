"""What the clients of each key use, for metrics and for the limits of their keys.

Tokens are a bucket for each name of a key, or for each key without one: it holds a minute's tokens, fills evenly, and a
request may overdraw it, so the largest prompt is served, too. Time is an argument.
"""

import math
import time
from dataclasses import dataclass

from base.metrics import Metrics
from gateway.errors import ApiError
from gateway.keys import UNNAMED, Client
from gateway.preparer import PreparedRequest


@dataclass
class _Account:
    """left: tokens that may be used, below 0 if they are overdrawn, at the time `at`. Keys without a limit leave it."""

    left: float = math.inf
    at: float = 0.0
    serving: int = 0


class ClientUsage:
    """The accounts of this gateway's clients. The event loop owns it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._accounts: dict[str | bytes, _Account] = {}
        """Of keys that have limits."""

    def begin(self, client: Client, now: float) -> None:
        """A request of a client begins, and has to end. Raises ApiError (429) if that is more than its key allows."""
        account, most = self._account(client, now), client.max_concurrent_requests
        if most is not None and account.serving >= most:
            raise self._refused("client_requests", f"this key has {most} requests at a time, its limit", 1.0)
        self._check_tokens(client, now)
        account.serving += 1
        if client.name is not None:
            self._metrics.client_requests.labels(client.name).inc()

    def prompt(self, client: Client, tokens: int) -> None:
        """A request's prompts have so many tokens. Raises ApiError (429) if others used up the client's meanwhile."""
        now = time.monotonic()
        self._check_tokens(client, now)
        self.add(client, "prompt", tokens, now)

    def end(self, client: Client, prepared: PreparedRequest | None) -> None:
        """A request has ended. prepared: what was generated for it, if anything."""
        now = time.monotonic()
        if prepared is not None:
            self.add(client, "cached", prepared.cached_tokens, now)
            self.add(client, "generated", prepared.generated_tokens, now)
        self._account(client, now).serving -= 1

    def add(self, client: Client, kind: str, tokens: int, now: float) -> None:
        """Count tokens. kind: prompt or generated, both of which the limit counts, or cached: those of prompts."""
        if client.name is not None:
            self._metrics.client_tokens.labels(client.name, kind).inc(tokens)
        if kind != "cached" and client.tokens_per_minute is not None:
            self._account(client, now).left -= tokens

    def _check_tokens(self, client: Client, now: float) -> None:
        """Raises ApiError (429) while the client has used up its tokens."""
        account, rate = self._account(client, now), client.tokens_per_minute
        if rate is not None and account.left <= 0:
            wait = (1 - account.left) * 60 / rate
            raise self._refused("client_tokens", f"this key has used its {rate} tokens per minute", wait)

    def _account(self, client: Client, now: float) -> _Account:
        """The account of a key, up to date. That of a key without limits is not kept."""
        if client.max_concurrent_requests is None and client.tokens_per_minute is None:
            return _Account()
        name = client.key if client.name == UNNAMED else client.name or ""
        account = self._accounts.setdefault(name, _Account())
        if (rate := client.tokens_per_minute) is not None:
            account.left = min(rate, account.left + (now - account.at) * rate / 60)
            account.at = now
        return account

    def _refused(self, reason: str, state: str, retry_after: float) -> ApiError:
        self._metrics.http_refused.labels(reason=reason).inc()
        return ApiError(429, f"{state}; try again later", code="rate_limit_exceeded", retry_after=retry_after)
