"""A service that is asked one request at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from base.errors import StartupError
from benchmarks.serving.client import Client, Endpoint, Outcome
from benchmarks.serving.workload import Prompt

_SETTLE_S = 0.05
"""After an answer: a node puts what it has into its cache when the client has its last token already."""


@dataclass(frozen=True)
class Subject:
    """An endpoint and the client for it."""

    endpoint: Endpoint
    client: Client

    @property
    def label(self) -> str:
        return self.endpoint.label

    async def ask(self, token_ids: Sequence[int], output_tokens: int = 1) -> Outcome:
        """Returns when the service has been left alone for a moment. Raises StartupError for a request that fails."""
        outcome = await self.client.send(self.endpoint.request(Prompt(list(token_ids), output_tokens)))
        if outcome.failure is not None:
            kind, message = outcome.failure.kind, outcome.failure.message
            raise StartupError(f"{self.label}: {len(token_ids)} tokens are not answered: {kind}: {message}")
        await asyncio.sleep(_SETTLE_S)
        return outcome
