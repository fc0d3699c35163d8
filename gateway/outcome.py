"""What has become of one answer, for usage and for the access log."""

from dataclasses import dataclass, field


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
