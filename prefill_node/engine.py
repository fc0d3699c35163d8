"""What a prefill node's endpoint asks of the engine that computes prompts and writes their KV to decode nodes."""

from dataclasses import dataclass
from typing import Protocol

from control.messages import AttemptId, ChunkDone, Peer, PrefillDone, PrefillRequest


@dataclass(frozen=True)
class Failing:
    """The attempt failed while writes of it are in flight. `Stopped` follows when none is. lingering: so far."""

    attempt: AttemptId
    reason: str
    lingering: bool


@dataclass(frozen=True)
class Stopped:
    """Nothing of an uncompleted attempt is in flight, and the engine keeps nothing of it.

    reason: why it failed; None if it was aborted. lingering: bytes of failed writes may still land, since the network
    holds them.
    """

    attempt: AttemptId
    reason: str | None
    lingering: bool


PrefillUpdate = ChunkDone | PrefillDone | Failing | Stopped
"""What the engine tells the endpoint of an attempt. ChunkDone and PrefillDone are for the decode node as they are. The
engine keeps the KV after PrefillDone until the attempt is released."""


@dataclass(frozen=True)
class PrefillProgress:
    """computed: tokens of each held attempt. current_pass: number of the forward pass that is running."""

    computed: dict[AttemptId, int]
    current_pass: int | None


class PrefillEngine(Protocol):
    """Holds an attempt from `start` until `release` or `Stopped`. One loop calls it."""

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
        """Compute and write no more of a held attempt. `Stopped` follows; before it `Failing`, if there is a reason.

        False if it was stopped before. A second call without a reason makes `Stopped` come without one.
        """
        ...

    def release(self, attempt: AttemptId) -> bool:
        """Forget an attempt whose KV the decode node has. False, and nothing changes, before `PrefillDone`."""
        ...

    def poll(self) -> list[PrefillUpdate]:
        """Do what can be done now, and return what has happened since the last call. Never waits.

        To be called in every turn of the loop, which the engine wakes. Raises DeviceFailed if the device does not work
        any more.
        """
        ...

    def progress(self, attempts: tuple[AttemptId, ...]) -> PrefillProgress:
        """The progress of those of these attempts that are held."""
        ...

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        """Close the connections to other decode nodes, once nothing waits to be sent there."""
        ...
