"""What a decode node keeps of a prefill that it has asked for, and the two ways in which that ends."""

from dataclasses import dataclass, field

from control.messages import ChunkDone, Peer, PrefillDone, Token
from decode_node.arrival import Arrival, Stage
from decode_node.request import Request
from decode_node.verifier import Placement
from hisparse.extents import HostSlots


@dataclass
class Attempt:
    """One dispatched prefill, for as long as its request wants it and its slots are writable.

    `accepted`: the node has said that it works on it.
    """

    request: Request
    node: Peer
    slots: HostSlots
    dispatched_at: float
    accepted: bool = False
    computed: int = 0
    """Prompt tokens that the node has computed, as far as it has said."""
    current_pass: int | None = None
    """The forward pass that was under way when it said so."""
    progressed_at: float = field(init=False)
    """When it was last seen to get on (time.monotonic)."""
    arrival: Arrival = field(init=False)
    placement: Placement = field(init=False)

    def __post_init__(self) -> None:
        self.progressed_at = self.dispatched_at
        self.arrival = Arrival(self.request.num_tokens)
        self.placement = Placement(self.slots, self.request.num_tokens)

    @property
    def needs_node(self) -> bool:
        """Whether it is lost if the node says nothing more."""
        return self.arrival.stage is Stage.COMING

    def accept(self, now: float) -> None:
        """The node has taken it: a first step, of which later ones count."""
        if not self.accepted:
            self.accepted = True
            self.progressed_at = now

    def note_progress(self, computed: int, current_pass: int | None, now: float) -> None:
        """The node says how far it is. It gets on also while those get on that it waits behind.

        Once its prompt is computed it does as long as the node says so, which has a deadline itself for the transfer;
        but not any more when it has said that everything landed, and not of every part with which checksums.
        """
        is_sending = computed == self.request.num_tokens and self.arrival.done is None
        if is_sending or (computed, current_pass) != (self.computed, self.current_pass):
            self.progressed_at = now
        self.computed, self.current_pass = computed, current_pass

    def take(self, message: ChunkDone | PrefillDone, now: float) -> None:
        """A part has landed, and the verifier has its checksums."""
        self.arrival.take(message)
        self.progressed_at = now


@dataclass(frozen=True)
class Landed:
    """The prompt's KV is in host memory and the first token is known."""

    request: Request
    token: Token


@dataclass(frozen=True)
class Lost:
    """The attempt failed; the request holds nothing any more."""

    request: Request
    reason: str


Outcome = Landed | Lost
