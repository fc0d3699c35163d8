"""A link of a given rate before a channel: bytes take their time one after another, then they count as landed."""

import time

from transfer.choices import Transport
from transfer.planner import Descriptors
from transfer.writer import Channel, Outcome, Pending

_BATCH = 8
"""Descriptors of a batch: what is given up ends soon."""


class ThrottledChannel:
    """Passes `rate` bytes a second; a rate of 0 for all that the channel can."""

    attempts = 1

    def __init__(self, channel: Channel, rate: float) -> None:
        self.transport: Transport = channel.transport
        self.max_batch = min(channel.max_batch, _BATCH)
        self.max_bytes = min(channel.max_bytes, 1 << 16)
        self._channel = channel
        self._rate = rate
        self._free_at = 0.0
        self.check = channel.check
        self.close = channel.close

    def submit(self, batch: Descriptors) -> Pending:
        self._free_at = max(self._free_at, time.monotonic()) + int(batch.lengths.sum()) / self._rate
        pending, arrives_at = self._channel.submit(batch), self._free_at

        def arrived() -> Outcome:
            outcome = pending()
            time.sleep(max(0.0, arrives_at - time.monotonic()))
            return outcome

        return arrived


def throttled(channel: Channel, rate: float) -> Channel:
    """The channel itself for a rate of 0."""
    return ThrottledChannel(channel, rate) if rate else channel
