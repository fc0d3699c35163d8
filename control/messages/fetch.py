"""Between prefill nodes and decode nodes: prefixes that are read out of a decode node's pool."""

from typing import Self

from pydantic import model_validator

from base.wire import UInt
from control.messages.common import Message
from control.messages.prefill import AttemptId
from transfer.memory import Checksums


class FetchRequest(Message):
    """Prefill node to decode node: let me read positions [start, stop), which lie before `PrefillRequest.start`.

    Repeated until FetchGrant or FetchRefused, or until the node does not want it any more.
    """

    attempt: AttemptId
    start: UInt
    stop: UInt

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.start >= self.stop:
            raise ValueError(f"nothing to read in [{self.start}, {self.stop})")
        return self


class FetchGrant(Message):
    """Decode node to prefill node: positions [start, stop) are here, and stay until the node has said FetchDone.

    extents: (start, length) runs of slots in the order of positions, for `start` and those behind it. checksums: of
    what lies there, all positions of all buffers.
    """

    attempt: AttemptId
    start: UInt
    stop: UInt
    extents: tuple[tuple[UInt, UInt], ...]
    checksums: Checksums


class FetchRefused(Message):
    """Decode node to prefill node: these positions may not be read, so they have to be computed."""

    attempt: AttemptId
    reason: str


class FetchDone(Message):
    """Prefill node to decode node: no read of this attempt is in flight, and none will follow. Sent once.

    Whatever says that no write is in flight says the same of reads.
    """

    attempt: AttemptId
