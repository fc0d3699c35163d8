"""What a decode node's tests share: peers, and a destination that names no real memory."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from control.messages import AttemptId, Destination, Generate, Peer
from decode_node.attempt import Attempt, AttemptTable
from decode_node.prefill_nodes import PrefillNodes
from decode_node.prefix_reads import PrefixReads
from decode_node.quarantine import Quarantine
from decode_node.request import Request
from decode_node.verifier import Verification
from kvcache.extents import NO_SLOTS, HostSlots
from tests.identity import IDENTITY
from transfer.fencing import ReservationTable
from transfer.memory import BufferInfo, Session

GATEWAY = Peer(role="gateway", address="127.0.0.1:1", boot_id="gateway")
PREFILL = Peer(role="prefill", address="127.0.0.1:2", boot_id="prefill")


def destination(num_slots: int) -> Destination:
    """Two layers of items and one of index keys, at addresses that must not be read."""
    lengths = (16 * num_slots, 16 * num_slots, 8 * num_slots)
    return Destination(
        identity=IDENTITY,
        buffers=BufferInfo(ptrs=(1, 2, 3), lengths=lengths, item_lengths=(16, 16, 8)),
        sessions=(Session(transport="tcp", name="127.0.0.1:9"),),
    )


def quarantine_of(control: Any, table: ReservationTable[AttemptId, Peer, Any]) -> Quarantine:
    """The quarantine of a node that has no cached prefixes to be read."""
    nodes = PrefillNodes(control, patience=10.0)
    reads = PrefixReads(control, AttemptTable(), nodes, lambda *_: NO_SLOTS, lambda _: None, lambda _: False)
    return Quarantine(control, table, nodes, reads)


def attempt_to_fill(slots: HostSlots, num_tokens: int, epoch: int = 1) -> Attempt:
    """An attempt to have these slots filled with the KV of that many tokens."""
    request = Request(Generate(request_id="r", prompt_ids=(1,) * (num_tokens + 1), max_new_tokens=4), GATEWAY)
    return Attempt(AttemptId("decode", "r", epoch), request, PREFILL, slots, 0.0, num_tokens)


class Lost(NamedTuple):
    """A request has lost its prefill attempt."""

    request: Request
    reason: str


@dataclass
class HeldVerifier:
    """Keeps what is to be verified until the test says what came of it; takes no more than `room`."""

    room: int = 8
    waiting: list[Verification] = field(default_factory=list)

    def submit(self, verification: Verification) -> bool:
        if len(self.waiting) >= self.room:
            return False
        self.waiting.append(verification)
        return True
