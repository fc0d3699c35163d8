"""The codec: what goes in comes out, and no bytes, however mangled, get further than MalformedMessage."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from control.codec import PROTOCOL_VERSION, MalformedMessage, decode, encode
from control.messages import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    AttemptId,
    Cancel,
    ChunkDone,
    ChunkTaken,
    Destination,
    FurtherChoice,
    Generate,
    HeartbeatAck,
    Message,
    NotHeld,
    Output,
    Outputs,
    Peer,
    PrefillDone,
    PrefillRequest,
    Sampling,
    Token,
)
from tests.identity import IDENTITY
from transfer.memory import BufferInfo, Checksum, Checksums, Session, SharedMemory

ME = Peer(role="decode", address="127.0.0.1:8021", boot_id="boot")
GATEWAY = Peer(role="gateway", address="127.0.0.1:8001", boot_id="boot")
PREFILL = Peer(role="prefill", address="127.0.0.1:8011", boot_id="boot")
ATTEMPT = AttemptId("boot", "r", 1)


def prefill_request(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "attempt": ATTEMPT,
        "token_ids": (1, 2, 3),
        "last_token_id": 4,
        "destination": Destination(
            sessions=(Session(transport="tcp", name="127.0.0.1:15000"),),
            identity=IDENTITY,
            buffers=BufferInfo(ptrs=(4096, 8192), lengths=(1920, 640), item_lengths=(192, 64)),
        ),
        "extents": ((4, 2), (0, 1)),
        "hisparse": True,
    }
    return PrefillRequest(**{**fields, **changes})


def sender_of(message: Message) -> Peer:
    """A process that may send it."""
    return next(peer for peer in (ME, GATEWAY, PREFILL) if peer.role in message.sent_by)


def sample_messages() -> list[Message]:
    return [
        prefill_request(),
        Generate(
            request_id="r",
            prompt_ids=(1, 2),
            max_new_tokens=3,
            sampling=Sampling(temperature=0.5, top_logprobs=3),
            prefill_nodes=(ME,),
        ),
        Generate(request_id="r", prompt_ids=(1,), max_new_tokens=3, further=(FurtherChoice(request_id="s", seed=1),)),
        Generate(request_id="r", prompt_ids=(1,), max_new_tokens=3, generated=(7, 8)),
        Cancel(request_id="r"),
        ChunkTaken(attempt=ATTEMPT, number=2),
        Outputs.of([Output("r", 3, (Token(7, -0.5, ((7, -0.5),)),)), Output("s", 0, finish_reason="abort")]),
    ]


def said_by_prefill_nodes() -> list[Message]:
    checksums = Checksums.of([Checksum(0, 0, 8, 2**64 - 1), Checksum(1, 0, 8, 5)])
    return [
        ChunkDone(attempt=ATTEMPT, number=0, checksums=checksums),
        PrefillDone(attempt=ATTEMPT, num_tokens=9, chunks=1, checksums=checksums),
    ]


@pytest.mark.parametrize("message", [*sample_messages(), *said_by_prefill_nodes()], ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    sender = sender_of(message)
    frame, decoded = decode(encode(message, sender, "to"))
    assert (frame.sender, frame.to, decoded) == (sender, "to", message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 101.0),
        ("logit_bias", ((1, 1e300),)),
        ("allowed_token_ids", (1,) * (MAX_ALLOWED + 1)),
        ("bad_words", ((1,) * 5,) * (MAX_BAD_WORD_TOKENS // 5 + 1)),
    ],
)
def test_a_request_beyond_the_bounds_of_one_client_is_malformed(field: str, value: object) -> None:
    sampling = Sampling.model_construct(**{field: value})
    message = Generate(request_id="r", prompt_ids=(1,), max_new_tokens=1).model_copy(update={"sampling": sampling})
    with pytest.raises(MalformedMessage, match=f"Generate: sampling.{field}"):
        decode(encode(message, GATEWAY))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (Generate(request_id="r", prompt_ids=(1,), max_new_tokens=1), {"stop_token_ids": (1,) * 1025}),
        (HeartbeatAck(via="a:1", known=True), {"prefill_nodes": (PREFILL,) * 4097}),
        (HeartbeatAck(via="a:1", known=True), {"longest_prompts": {str(number): 1 for number in range(4097)}}),
        (HeartbeatAck(via="a:1", known=True), {"leaving": ("x",) * 4097}),
        (NotHeld(), {"attempts": (ATTEMPT,) * 16_385}),
    ],
)
def test_lists_that_a_loop_goes_through_are_bounded(message: Message, change: dict[str, Any]) -> None:
    [field] = change
    with pytest.raises(MalformedMessage, match=f"{field}: .* at most"):
        decode(encode(message.model_copy(update=change), sender_of(message)))


@pytest.mark.parametrize(
    "fields", [{"generated": (1, 2)}, {"further": ({"request_id": "s", "seed": 1, "generated": (1, 2)},)}]
)
def test_a_request_that_has_all_its_tokens_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected fewer than max_new_tokens 2, found 2"):
        Generate(request_id="r", prompt_ids=(1,), max_new_tokens=2, **fields)


def test_a_message_asks_for_a_request_for_each_choice_which_share_the_rest() -> None:
    message = Generate(
        request_id="r-0",
        prompt_ids=(1, 2),
        max_new_tokens=3,
        sampling=Sampling(seed=5, bad_words=((1,),)),
        group="g",
        prompt_logprobs=0,
        generated=(7, 8),
        further=(FurtherChoice(request_id="r-1", seed=6, generated=(5,)), FurtherChoice(request_id="r-2", seed=0)),
    )
    received = decode(encode(message, GATEWAY))[1]
    assert isinstance(received, Generate)
    choices = list(received.each())
    assert [(one.request_id, one.sampling.seed, one.prompt_logprobs) for one in choices] == [
        ("r-0", 5, 0),
        ("r-1", 6, None),
        ("r-2", 0, None),
    ]
    assert [one.generated for one in choices] == [(7, 8), (5,), ()]
    first, *others = choices
    for other in others:
        assert (other.group, other.further, other.sampling.bad_words) == ("g", (), ((1,),))
        assert other.prompt_ids is first.prompt_ids
        assert other.packed_prompt is first.packed_prompt
        assert other.prompt.tolist() == [1, 2]
    assert list(choices[0].each()) == choices[:1]


@given(st.sampled_from([*sample_messages(), *said_by_prefill_nodes()]), st.data())
def test_mutated_bytes_never_crash(message: Message, data: st.DataObject) -> None:
    """A changed, cut or stretched frame is either still valid or MalformedMessage, nothing else."""
    frame = bytearray(encode(message, sender_of(message)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                frame[place] = data.draw(st.integers(0, 255))
            case "cut":
                frame = frame[: max(1, place)]
            case "insert":
                frame[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        read, decoded = decode(bytes(frame))
    except MalformedMessage:
        return
    assert read.v != PROTOCOL_VERSION or isinstance(decoded, Message)


@given(st.binary(max_size=200))
def test_garbage_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_unknown_fields_are_ignored_and_missing_optional_ones_default() -> None:
    frame = msgpack.unpackb(encode(prefill_request(), ME))
    frame["body"]["from_a_later_release"] = 1
    frame["later"] = 2
    del frame["body"]["hisparse"]
    _, message = decode(msgpack.packb(frame))
    assert isinstance(message, PrefillRequest)
    assert message.hisparse is False


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"v": "5"}, "Frame: v"),
        ({"kind": "Nonsense"}, "unknown message kind"),
        ({"body": {"request_id": 5}}, "request_id"),
        ({"body": {}}, "request_id"),
        ({"sender": {"role": "king", "address": "a:1", "boot_id": "b"}}, "role"),
        ({"sender": {"role": "decode", "address": "no port", "boot_id": "b"}}, "address"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], complaint: str) -> None:
    frame = {**msgpack.unpackb(encode(Cancel(request_id="r"), GATEWAY)), **change}
    with pytest.raises(MalformedMessage, match=complaint):
        decode(msgpack.packb(frame))


def test_a_frame_of_wrong_elements_has_one_error_per_list() -> None:
    frame = msgpack.unpackb(encode(prefill_request(), ME))
    frame["body"].update(attempt=[0] * 10_000, extents=[0] * 10_000)
    with pytest.raises(MalformedMessage, match="attempt") as refused:
        decode(msgpack.packb(frame))
    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() == 2


@pytest.mark.parametrize("message", [*sample_messages(), *said_by_prefill_nodes()], ids=lambda m: type(m).__name__)
def test_what_a_role_does_not_send_is_malformed(message: Message) -> None:
    """A prefill node's key, say, makes nobody write."""
    for sender in (ME, GATEWAY, PREFILL):
        if sender.role not in message.sent_by:
            reason = f"a {sender.role} process does not send {type(message).__name__}"
            with pytest.raises(MalformedMessage, match=reason):
                decode(encode(message, sender))


def test_columns_that_differ_in_length_are_malformed() -> None:
    with pytest.raises(ValueError, match="the columns differ in length"):
        Checksums(buffers=(0, 1), starts=(0,), stops=(1,), digests=(2,))


def test_a_configuration_mismatch_names_both_values() -> None:
    other = IDENTITY.model_copy(update={"dtype": "bfloat16", "item_bytes": 96})
    assert IDENTITY.differences(other) == "dtype float32 != bfloat16, item_bytes 16 != 96"
    assert IDENTITY.differences(IDENTITY) == ""


@given(st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 3, st.integers(0, 2**64 - 1))))
def test_checksums_survive_the_wire_in_their_order(rows: list[tuple[int, int, int, int]]) -> None:
    checksums = Checksums.of([Checksum(*row) for row in rows])
    done = PrefillDone(attempt=ATTEMPT, num_tokens=3, checksums=checksums)
    chunk = ChunkDone(attempt=ATTEMPT, number=len(rows), checksums=checksums)
    for message in (done, chunk):
        _, decoded = decode(encode(message, PREFILL))
        assert isinstance(decoded, PrefillDone | ChunkDone)
        assert decoded == message
        assert list(decoded.checksums.rows()) == rows
        assert len(decoded.checksums) == len(rows)


def test_a_buffer_outside_the_shared_memory_is_malformed() -> None:
    shared = SharedMemory(pid=1, fd=3, name="m", base=4096, length=8192)
    inside = BufferInfo(ptrs=(4096, 8192), lengths=(4096, 4096), item_lengths=(64, 64))
    Destination(identity=IDENTITY, buffers=inside, shared=shared)
    for ptr in (4095, 8193):
        with pytest.raises(ValueError, match="outside the shared memory"):
            Destination(identity=IDENTITY, buffers=inside.model_copy(update={"ptrs": (4096, ptr)}), shared=shared)
