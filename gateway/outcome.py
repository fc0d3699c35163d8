"""What has become of one answer, for usage and for the access log."""

from dataclasses import dataclass, field

from control.messages import DraftCounts


@dataclass(slots=True)
class AnswerOutcome:
    """reason: why it ended; nobody sets it when the client cancels. ttft: seconds until its first token."""

    reason: str = "cancelled"
    tokens: int = 0
    cached_tokens: int = 0
    """Of its prompt, those that were not computed for it, as soon as a node has said so."""
    ttft: float | None = None
    drafts: DraftCounts = (0, 0)
    """Of all tries, if the client asked for them."""
    drafts_before: DraftCounts = (0, 0)
    """Of the tries before this one."""
    migrations: int = 0
    """How often it went on at another decode node, as its own had failed."""
    nodes: list[str] = field(default_factory=list)
    """Addresses of the decode nodes that were asked for it, in order."""

    def note_drafts(self, of_this_try: DraftCounts) -> None:
        """of_this_try: those of its steps so far."""
        (verified, right), (more_verified, more_right) = self.drafts_before, of_this_try
        self.drafts = verified + more_verified, right + more_right
