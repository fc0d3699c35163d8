"""What a decode node keeps of a prefill that it has asked for, and the two ways in which that ends."""

from dataclasses import dataclass

from decode_node.request import Request
from hisparse.extents import HostSlots
from transfer.messages import Peer, PrefillDone, Token


@dataclass
class Attempt:
    """One dispatched prefill, for as long as its request wants it and its slots are writable.

    `accepted`: the node has said that it works on it. `done`: it has said that everything landed, and the checksums are
    being verified; from then on nothing depends on the node any more.
    """

    request: Request
    node: Peer
    slots: HostSlots
    dispatched_at: float
    accepted: bool = False
    done: PrefillDone | None = None


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
