"""What has become of one answer, for usage and for the access log, and of all answers of a node."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class AnswerOutcome:
    """reason: why it ended; nobody sets it when the client cancels. ttft: seconds until its first token."""

    reason: str = "cancelled"
    tokens: int = 0
    cached_tokens: int = 0
    """Of its prompt, those that were not computed for it, as soon as a node has said so."""
    ttft: float | None = None
    migrations: int = 0
    """How often it went on at another decode node, as its own had failed."""
    nodes: list[str] = field(default_factory=list)
    """Addresses of the decode nodes that were asked for it, in order."""


class ServedTokens(NamedTuple):
    """Tokens that a decode node generated, those of the prompts of its answers, and of these the ones it had cached."""

    generated: int = 0
    prompt: int = 0
    cached: int = 0

    def plus(self, other: "ServedTokens", sign: int = 1) -> "ServedTokens":
        return ServedTokens(*(mine + sign * its for mine, its in zip(self, other, strict=True)))


NOTHING_SERVED = ServedTokens()
