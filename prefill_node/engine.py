"""What a prefill node's endpoint asks of the engine that computes prompts and writes their KV to decode nodes."""

from typing import Protocol

from control.messages import (
    AttemptId,
    ChunkDone,
    FetchDone,
    FetchGrant,
    FetchRefused,
    FetchRequest,
    Peer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Quiesced,
)

PrefillUpdate = ChunkDone | PrefillDone | PrefillFailed | Quiesced | FetchRequest | FetchDone
"""What the engine says of an attempt, for its decode node.

FetchRequest asks for KV that the decode node has; FetchDone says that none is read any more, and ends the asking.
After PrefillDone it keeps the KV until the attempt is released. After PrefillFailed with `in_flight` another follows
when no write is in flight. After PrefillFailed without it, or Quiesced, it keeps nothing of the attempt.
"""


class PrefillEngine(Protocol):
    """Holds an attempt from `start` until its `release`, or until it was stopped and has ended. One loop calls it."""

    def refusal(self, decode: Peer, request: PrefillRequest) -> str | None:
        """Why the engine cannot serve a request, naming both values, or None."""
        ...

    def start(self, decode: Peer, request: PrefillRequest) -> None:
        """Compute the KV of a request that was not refused, and write it where the request says."""
        ...

    def has_begun(self, attempt: AttemptId) -> bool:
        """Whether any token of a held attempt was computed or is being computed."""
        ...

    def stop(self, attempt: AttemptId, reason: str | None = None) -> bool:
        """Compute and write no more of a held attempt. PrefillFailed with the reason follows; without one, Quiesced.

        False if it was stopped before; it may have ended, with an update that `poll` has yet to return. A second call
        without a reason takes the reason back.
        """
        ...

    def release(self, attempt: AttemptId) -> bool:
        """Forget an attempt whose KV the decode node has. False, and nothing changes, before `PrefillDone`."""
        ...

    def fetch_answered(self, answer: FetchGrant | FetchRefused) -> None:
        """The decode node lends what `FetchRequest` has asked for, or does not. The attempt may have ended."""
        ...

    def poll(self) -> list[PrefillUpdate]:
        """Do what can be done now, and return what has happened since the last call. Never waits.

        To be called in every turn of the loop, which the engine wakes. Raises DeviceFailed if the device does not work
        any more, and GroupFailed if another rank of this node does not.
        """
        ...

    def progress(self, attempts: tuple[AttemptId, ...]) -> Progress:
        """The progress of those of these attempts that are held."""
        ...

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        """Close the connections to other decode nodes, once nothing waits to be sent there."""
        ...
