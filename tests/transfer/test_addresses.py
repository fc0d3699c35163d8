"""No message makes anyone write outside the pools that it names, nor name what is no pool."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.codec import MalformedMessage, decode, encode
from control.messages import Destination, Peer, PrefillRequest
from prefill_node.offer import Destinations
from prefill_node.plan import ChunkPlan
from tests.control.test_messages import ME, prefill_request
from tests.identity import IDENTITY
from transfer.memory import BufferInfo, Session, SharedMemory
from transfer.planner import expand_extents

ITEMS = (192, 64)
BASES = (1 << 20, 1 << 30)


def changed(path: str, value: Any) -> bytes:
    """A prefill request's frame with one field of its body exchanged."""
    frame = msgpack.unpackb(encode(prefill_request(), ME), use_list=True)
    *parents, name = path.split(".")
    part = frame["body"]
    for parent in parents:
        part = part.setdefault(parent, {})
    part[name] = value
    packed: bytes = msgpack.packb(frame)
    return packed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("extents", [[8, 3]]),
        ("extents", [[10, 1], [0, 3]]),
        ("extents", [[-1, 4]]),
        ("extents", [[0, -3]]),
        ("extents", [[2**63 - 1, 3]]),
        ("extents", [[0, 2**62]] * 2),
        ("extents", [[0, 10]] * 2),
        ("extents", [[0, 2]]),
        ("destination.buffers.ptrs", [4096]),
        ("destination.buffers.ptrs", [-1, 8192]),
        ("destination.buffers.ptrs", [4096, 2**63 - 100]),
        ("destination.buffers.ptrs", [4096, 2**64 - 1]),
        ("destination.buffers.lengths", [1920, -640]),
        ("destination.buffers.lengths", [1920, 641]),
        ("destination.buffers.lengths", [2**63 // 192 * 192, 640]),
        ("destination.buffers.item_lengths", [192, 0]),
        ("destination.buffers.lengths", [0, 0]),
        ("destination.shared", {"pid": 1, "fd": 3, "name": "m", "base": 4096, "length": 4096}),
        ("destination.shared", {"pid": 1, "fd": 3, "name": "m", "base": 0, "length": 2**63}),
        ("destination.shared", {"pid": 2**40, "fd": 3, "name": "m", "base": 0, "length": 2**40}),
        ("destination.shared", {"pid": 1, "fd": -1, "name": "m", "base": 0, "length": 2**40}),
    ],
)
def test_addresses_outside_the_pools_are_malformed(path: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        decode(changed(path, value))


@st.composite
def requests(draw: st.DrawFn) -> PrefillRequest:
    """Any request that is not malformed, its extents anywhere in small pools."""
    slots = draw(st.integers(1, 200))
    extents = draw(st.lists(st.tuples(st.integers(0, 220), st.integers(0, 220)), min_size=1, max_size=6))
    prompt = tuple(range(draw(st.integers(1, 200))))
    buffers = BufferInfo(ptrs=BASES, lengths=tuple(slots * item for item in ITEMS), item_lengths=ITEMS)
    body = {
        **prefill_request().model_dump(exclude={"destination", "extents", "token_ids"}),
        "token_ids": prompt,
        "extents": tuple(extents),
        "destination": Destination(identity=IDENTITY, buffers=buffers),
    }
    try:
        return PrefillRequest.model_validate(body)
    except ValueError:
        # What a message that is refused would have said is no matter.
        return PrefillRequest.model_validate({**body, "token_ids": (1,), "extents": ((slots - 1, 1),)})


@given(requests(), st.integers(1, 64))
def test_whatever_is_written_for_a_valid_message_lies_in_its_pools(request: PrefillRequest, most_items: int) -> None:
    num_tokens = len(request.token_ids)
    slots = expand_extents(request.extents, num_tokens)
    plan = ChunkPlan(np.arange(num_tokens), 1, slots, 0, num_tokens)
    buffers = request.destination.buffers
    for base, length, item in zip(buffers.ptrs, buffers.lengths, buffers.item_lengths, strict=True):
        for part in plan.parts(most_items):
            for descriptors in (part.direct(item).at(0, base), part.packed(item)[1].at(0, base)):
                assert base <= descriptors.destinations.min()
                assert (descriptors.destinations + descriptors.lengths).max() <= base + length


def test_huge_extents_take_no_memory() -> None:
    assert expand_extents(((5, 2**62), (7, 2**61)), 3).tolist() == [5, 6, 7]


DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="boot")
OFFERED = Destination(
    identity=IDENTITY,
    buffers=BufferInfo(ptrs=BASES, lengths=(1920, 640), item_lengths=ITEMS),
    sessions=(Session(transport="tcp", name="127.0.0.1:15000"),),
)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"buffers": OFFERED.buffers.model_copy(update={"ptrs": (BASES[0], BASES[1] + 64)})}, "buffers"),
        ({"buffers": OFFERED.buffers.model_copy(update={"lengths": (3840, 1280)})}, "buffers"),
        ({"sessions": (Session(transport="tcp", name="127.0.0.2:15000"),)}, "sessions"),
        ({"shared": SharedMemory(pid=1, fd=3, name="m", base=0, length=1 << 40)}, "shared"),
    ],
)
def test_a_process_has_the_pools_that_it_offered_first(change: dict[str, object], field: str) -> None:
    destinations = Destinations()
    assert destinations.rejection_reason(DECODE, OFFERED) is None
    assert destinations.rejection_reason(DECODE, OFFERED.model_copy()) is None
    said = destinations.rejection_reason(DECODE, OFFERED.model_copy(update=change))
    assert said == f"127.0.0.1:9 offered another destination before: {field} changed"
    assert destinations.rejection_reason(DECODE, OFFERED) is None
    restarted = DECODE.model_copy(update={"boot_id": "next"})
    assert destinations.rejection_reason(restarted, OFFERED.model_copy(update=change)) is None


def test_processes_that_were_long_silent_are_forgotten() -> None:
    destinations = Destinations(limit=2)
    other = OFFERED.model_copy(update={"sessions": ()})
    for boot_id in ("a", "b", "a", "c"):
        assert destinations.rejection_reason(DECODE.model_copy(update={"boot_id": boot_id}), OFFERED) is None
    assert destinations.rejection_reason(DECODE.model_copy(update={"boot_id": "a"}), other) is not None
    assert destinations.rejection_reason(DECODE.model_copy(update={"boot_id": "b"}), other) is None
