"""Which requests a prefill node accepts."""

from control.messages import Destination, PrefillRequest
from prefill_node.offer import Offer
from tests.control.test_messages import prefill_request
from tests.identity import IDENTITY
from transfer.memory import BufferInfo, Session


def request(*ranks: str) -> PrefillRequest:
    buffers = BufferInfo(ptrs=(4096, 8192, 12288), lengths=(160, 160, 80), item_lengths=(16, 16, 8))
    destination = Destination(
        sessions=(Session(transport="tcp", name="127.0.0.1:15000"),), identity=IDENTITY, buffers=buffers
    )
    return prefill_request(destination=destination, ranks=ranks)


def test_a_node_refuses_slots_that_are_not_reserved_for_all_of_its_ranks() -> None:
    """A rank that the decode node does not know could write to them when they have been given away."""
    offer = Offer(IDENTITY, ("tcp",), max_tokens=32, vocab_size=100, ranks=("b", "c"))
    assert offer.rejection_reason(request("c", "b")) is None
    assert offer.rejection_reason(request("b", "other")) == "the slots are not reserved for ranks c of this node"
    assert offer.rejection_reason(request()) == "the slots are not reserved for ranks b, c of this node"
