"""One try to have a request's prompt prefilled by another node, as the decode node sees it."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from control.messages import AttemptId, ChunkDone, Peer, PrefillDone
from decode_node.request import Request
from hisparse.extents import HostSlots
from transfer.planner import Int64s

PartNumber = int | None
"""What has checksums of its own: a chunk, by its number, or None for what comes with PrefillDone."""


class AttemptState(Enum):
    """How far an attempt has come."""

    REQUESTED = "requested"
    """The node was asked and has not said that it works on it."""
    ACCEPTED = "accepted"
    """The node works on it, or has something to say again."""
    ANNOUNCED = "announced"
    """The node has said everything, and what it said is being verified: from now on nothing depends on it."""
    LANDED = "landed"
    """All KV is in host memory and is what was sent."""
    LOST = "lost"
    """It failed, or nobody wants it any more."""


_NEXT = {
    AttemptState.REQUESTED: {AttemptState.ACCEPTED, AttemptState.LOST},
    AttemptState.ACCEPTED: {AttemptState.ANNOUNCED, AttemptState.LOST},
    AttemptState.ANNOUNCED: {AttemptState.LANDED, AttemptState.LOST},
    AttemptState.LANDED: set(),
    AttemptState.LOST: set(),
}


@dataclass(eq=False)
class PrefillAttempt:
    """From the message that asks for it until it has landed or was lost. The decode node's loop owns it.

    What arrives comes in parts, in any order: chunks with checksums of their own, and PrefillDone, which says how many
    chunks there are and has the checksums of the rest. Each part is taken once, verified beside the loop, and then
    found to hold; one that does not hold ends the attempt.
    """

    id: AttemptId
    request: Request
    node: Peer
    slots: HostSlots
    dispatched_at: float
    num_tokens: int
    """Tokens whose KV was asked for."""
    state: AttemptState = AttemptState.REQUESTED
    computed: int = 0
    """Tokens that the node has computed, as far as it has said."""
    current_pass: int | None = None
    """The forward pass that was under way when it said so."""
    done: PrefillDone | None = None
    """What the node said when all had landed, once that was taken."""
    num_checksums: int = 0
    """In all parts that were taken."""
    progressed_at: float = field(init=False)
    """When it was last seen to get on (time.monotonic)."""
    _taken: set[PartNumber] = field(default_factory=set)
    _verified: set[PartNumber] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.progressed_at = self.dispatched_at

    @cached_property
    def positions(self) -> Int64s:
        """The slot of every position. Made where it is used first, which may take milliseconds."""
        return self.slots.slots()

    @property
    def needs_node(self) -> bool:
        """Whether it is lost if the node says nothing more."""
        return self.state in (AttemptState.REQUESTED, AttemptState.ACCEPTED)

    @property
    def is_verified(self) -> bool:
        """Whether all that was announced is what was sent."""
        return self.state is AttemptState.ANNOUNCED and len(self._verified) == len(self._taken)

    def move(self, to: AttemptState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"attempt {self.id} is {self.state.value} and cannot become {to.value}")
        self.state = to

    def accept(self, now: float) -> None:
        """The node has taken it: a first step, of which later ones count."""
        if self.state is AttemptState.REQUESTED:
            self.move(AttemptState.ACCEPTED)
            self.progressed_at = now

    def note_progress(self, computed: int, current_pass: int | None, now: float) -> None:
        """The node says how far it is. It gets on also while those get on that it waits behind.

        Once all is computed it does as long as the node says so, which has a deadline itself for the transfer; but not
        any more when it has said that everything landed, and has not yet told of every part with checksums.
        """
        is_sending = computed == self.num_tokens and self.done is None
        if is_sending or (computed, current_pass) != (self.computed, self.current_pass):
            self.progressed_at = now
        self.computed, self.current_pass = computed, current_pass

    def contradiction(self, message: ChunkDone | PrefillDone) -> str | None:
        """Why what the node says cannot be, after what it was asked for and what it said before, or None."""
        if isinstance(message, ChunkDone):
            return _beyond(message.number, self.num_tokens - 1 if self.done is None else self.done.chunks)
        if message.num_tokens != self.num_tokens:
            return f"prefill covered {message.num_tokens} tokens, not {self.num_tokens}"
        if message.chunks >= self.num_tokens:
            return f"{message.chunks} chunks before the last one, in {self.num_tokens} tokens"
        return _beyond(max((part for part in self._taken if part is not None), default=-1), message.chunks)

    def has(self, part: PartNumber) -> bool:
        """Whether it was taken, and is verified at most once."""
        return part in self._taken

    def take(self, message: ChunkDone | PrefillDone, now: float) -> None:
        """A part has landed, and the verifier has its checksums; where there are none, nothing is to be verified."""
        part = part_of(message)
        self._taken.add(part)
        self.num_checksums += len(message.checksums)
        self.progressed_at = now
        if isinstance(message, PrefillDone):
            self.done = message
        if not message.checksums:
            self._verified.add(part)
        if self.done is not None and len(self._taken) == self.done.chunks + 1:
            self.move(AttemptState.ANNOUNCED)

    def verified(self, part: PartNumber) -> None:
        """The checksums of a part hold. Raises RuntimeError if it was never taken."""
        if part not in self._taken:
            raise RuntimeError(f"part {part} was verified and never taken")
        self._verified.add(part)


def part_of(message: ChunkDone | PrefillDone) -> PartNumber:
    """What a message has the checksums of."""
    return message.number if isinstance(message, ChunkDone) else None


def _beyond(number: int, chunks: int) -> str | None:
    return f"chunk {number} landed, of {chunks} that there can be" if number >= chunks else None


@dataclass(frozen=True)
class Landed:
    """The KV of all tokens but the newest is in host memory."""

    request: Request


@dataclass(frozen=True)
class Lost:
    """The attempt failed; the request holds nothing any more."""

    request: Request
    reason: str


PrefillOutcome = Landed | Lost
