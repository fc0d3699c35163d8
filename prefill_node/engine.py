"""What a prefill node's endpoint asks of whatever computes prompts and writes their KV to decode nodes."""

from dataclasses import dataclass
from typing import Protocol

from control.messages import AttemptId, Checksums, Peer, PrefillRequest


@dataclass(frozen=True)
class ChunkSent:
    """Every write of a chunk before the last was confirmed. number: of the chunks that have checksums, from 0."""

    attempt: AttemptId
    number: int
    checksums: Checksums


@dataclass(frozen=True)
class AllSent:
    """Every write was confirmed. What the KV was read from is kept until the attempt is released.

    chunks: how many ChunkSent there are. checksums: of the rest. seconds: for how long something was being written.
    lingering: as in `PrefillDone`.
    """

    attempt: AttemptId
    num_tokens: int
    num_bytes: int
    descriptors: int
    seconds: float
    chunks: int
    checksums: Checksums
    lingering: bool = False


@dataclass(frozen=True)
class Failing:
    """The attempt will not be completed, and something of it is in flight: `Stopped` follows when nothing is.

    lingering: as in `Stopped`, as far as is known.
    """

    attempt: AttemptId
    reason: str
    lingering: bool


@dataclass(frozen=True)
class Stopped:
    """Nothing of an attempt that was not completed is in flight, and nothing is kept of it.

    reason: why it failed; None if it was stopped without one. lingering: some of its writes have failed without an
    answer, and what the network holds of them may still land.
    """

    attempt: AttemptId
    reason: str | None
    lingering: bool


PrefillUpdate = ChunkSent | AllSent | Failing | Stopped


@dataclass(frozen=True)
class PrefillProgress:
    """computed: tokens of each attempt that is held. current_pass: number of the forward pass that is under way."""

    computed: dict[AttemptId, int]
    current_pass: int | None


class PrefillEngine(Protocol):
    """Takes prompts and where their KV is to go, and says what is done. One loop calls it.

    An attempt is held from `start` until `release` or `Stopped`.
    """

    def refusal(self, decode: Peer, request: PrefillRequest) -> str | None:
        """Why a request cannot be done here, naming both values, or None."""
        ...

    def start(self, decode: Peer, request: PrefillRequest) -> None:
        """Compute the KV of a request that is not refused, and write it where the request says."""
        ...

    def holds(self, attempt: AttemptId) -> bool: ...

    def has_begun(self, attempt: AttemptId) -> bool:
        """Whether anything of an attempt that is held was computed or is being computed."""
        ...

    def stop(self, attempt: AttemptId, reason: str | None = None) -> bool:
        """Compute and write no more of it; `Failing`, if there is a reason, and `Stopped` follow.

        False if it was stopped before; without a reason, `Stopped` has none then either.
        """
        ...

    def release(self, attempt: AttemptId) -> bool:
        """The decode node has the KV of an attempt whose writes were all confirmed: nothing is kept of it any more.

        False if they were not: then nothing changes.
        """
        ...

    def poll(self) -> list[PrefillUpdate]:
        """Go on with what can go on, and return what has happened since the last call. Never waits.

        To be called in every turn of the loop, which is woken when something has happened. Raises DeviceFailed if the
        device does not work any more.
        """
        ...

    def progress(self, attempts: tuple[AttemptId, ...]) -> PrefillProgress:
        """How far it is with those of these attempts that it holds."""
        ...

    def keep_connected(self, decode_nodes: set[Peer]) -> None:
        """Give up the connections to other decode nodes once nothing waits for them."""
        ...
