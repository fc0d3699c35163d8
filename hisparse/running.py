"""A running request in the KV tiers of a decode node."""

from dataclasses import dataclass

from kvcache.extents import HostSlots


@dataclass(eq=False)
class RunningRequest:
    """num_tokens: tokens whose KV is on the host, by the steps that were read. unread: tokens that other steps, which
    were begun, give it at most. room: for how many tokens it has host slots, index pages and hot slots. limit: tokens
    that it may ever have there."""

    row: int
    host_slots: HostSlots
    num_tokens: int
    limit: int
    room: int
    unread: int = 0

    @property
    def reached(self) -> int:
        """How many tokens it has at most when the steps that were begun are over."""
        return self.num_tokens + self.unread

    @property
    def end(self) -> int:
        """The position before which its next step may compute tokens."""
        return min(self.room, self.limit)
