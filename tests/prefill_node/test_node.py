"""The prefill node's side of the protocol: idempotent, and never quiet too early."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefill_node.chunked import ChunkedPrefill
from prefill_node.entry import Key, Offer
from prefill_node.node import PrefillNode
from prefill_node.pool import PagedKVPool
from prefill_node.sender import Chunk, Sent
from service.metrics import Metrics
from tests.prefill_node.fakes import LAYOUT, FakeControl, FakeModel
from transfer.messages import (
    Abort,
    Admitted,
    BufferInfo,
    Destination,
    Holding,
    Message,
    ModelIdentity,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Sampling,
)

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")
IDENTITY = ModelIdentity(
    fingerprint="f", dtype="float32", num_layers=2, num_index_layers=1, item_bytes=16, index_key_bytes=8
)
BUFFERS = BufferInfo(ptrs=(1, 2, 3), lengths=(1600, 1600, 800), item_lengths=(16, 16, 8))
KEY = ("r", 1)


class HeldSender:
    """Keeps chunks until the test says that their writes ended."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def submit(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def keep_only(self, sessions: set[str]) -> None:
        pass


class Harness:
    def __init__(self) -> None:
        self.control = FakeControl()
        self.sender = HeldSender()
        self.prefill: ChunkedPrefill[Key] = ChunkedPrefill(
            FakeModel(),  # type: ignore[arg-type]
            PagedKVPool(LAYOUT, num_pages=8, page_size=4, device=torch.device("cpu")),
            chunk_size=6,
        )
        shell = SimpleNamespace(control=self.control, metrics=Metrics(), inbox=queue.SimpleQueue())
        self.node = PrefillNode(
            shell,  # type: ignore[arg-type]
            self.prefill,
            self.sender,  # type: ignore[arg-type]
            Offer(IDENTITY, "tcp", max_tokens=32, vocab_size=100),
            torch.device("cpu"),
        )

    def receive(self, message: Message) -> None:
        self.node._take((DECODE, message))

    def compute(self) -> None:
        for computed in self.node._compute():
            self.node._send(computed)

    def sent(self, error: str | None = None) -> None:
        self.node._take(Sent(self.sender.chunks.pop(0), num_bytes=10, num_descriptors=1, error=error))

    @property
    def free_pages(self) -> int:
        return self.prefill.pool.free_pages


def request(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "request_id": KEY[0],
        "epoch": KEY[1],
        "prompt_ids": tuple(range(10)),
        "destination": Destination(session="127.0.0.1:1", protocol="tcp", identity=IDENTITY, buffers=BUFFERS),
        "extents": ((0, 10),),
        "hisparse": True,
        "sampling": Sampling(temperature=0),
    }
    return PrefillRequest(**{**fields, **changes})


def test_done_is_said_after_the_last_write_and_repeated_until_admitted() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent()
    assert not h.control.repeated
    h.sent()
    [(peer, done)] = h.control.repeated.values()
    assert peer == DECODE
    assert isinstance(done, PrefillDone)
    assert (done.token.token_id, done.num_tokens, done.transferred_bytes) == (7, 10, 20)
    assert h.free_pages == 5, "pages are kept until the decode node has admitted the request"
    h.receive(Admitted(request_id="r", epoch=1))
    assert not h.control.repeated
    assert h.free_pages == 8


def test_a_repeated_request_is_answered_and_computed_once() -> None:
    h = Harness()
    h.receive(request())
    h.receive(request())
    assert len(h.control.take(PrefillAccepted)) == 2
    assert h.node.queued_tokens == 10


def test_quiesced_is_said_only_when_no_write_is_in_flight() -> None:
    """sglang PRs 24580, 31357: a late write after an abort corrupted another request."""
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.receive(Abort(request_id="r", epoch=1))
    assert all(chunk.cancelled() for chunk in h.sender.chunks)
    assert h.control.take(Quiesced) == []
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == []
    h.sent(error="aborted")
    assert h.control.take(Quiesced) == [Quiesced(request_id="r", epoch=1)]
    assert h.free_pages == 8


def test_an_abort_is_answered_again_and_a_late_repeat_of_its_request_is_not_started() -> None:
    h = Harness()
    for _ in range(2):
        h.receive(Abort(request_id="r", epoch=1))
    assert len(h.control.take(Quiesced)) == 2
    h.receive(request())
    assert h.control.take(Quiesced) == [Quiesced(request_id="r", epoch=1)]
    assert h.node.queued_tokens == 0


def test_the_next_epoch_is_another_request() -> None:
    h = Harness()
    h.receive(Abort(request_id="r", epoch=1))
    h.receive(request(epoch=2))
    assert h.node.queued_tokens == 10


def test_a_failed_write_ends_the_request_after_the_rest_has_drained() -> None:
    h = Harness()
    h.receive(request())
    h.compute()
    h.compute()
    h.sent(error="the peer is gone")
    assert h.control.take(PrefillFailed) == []
    h.sent()
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert "the peer is gone" in failed.reason
    assert h.free_pages == 8


def test_what_is_not_held_is_said() -> None:
    h = Harness()
    h.receive(request())
    h.receive(Holding(keys=(KEY, ("other", 3))))
    assert h.control.take(NotHeld) == [NotHeld(keys=(("other", 3),))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hisparse": False}, "hisparse=false"),
        ({"prompt_ids": tuple(range(33)), "extents": ((0, 33),)}, "prompt of 33 tokens; this node takes up to 32"),
        ({"prompt_ids": (100,)}, "token id 100 is outside the vocabulary of 100"),
        (
            {
                "destination": Destination(
                    session="a:1",
                    protocol="tcp",
                    identity=IDENTITY.model_copy(update={"dtype": "bfloat16"}),
                    buffers=BUFFERS,
                )
            },
            "dtype float32 != bfloat16",
        ),
        (
            {"destination": Destination(session="a:1", protocol="rdma", identity=IDENTITY, buffers=BUFFERS)},
            "transfer protocol tcp != rdma",
        ),
        (
            {
                "destination": Destination(
                    session="a:1",
                    protocol="tcp",
                    identity=IDENTITY,
                    buffers=BufferInfo(ptrs=(1,), lengths=(160,), item_lengths=(16,)),
                )
            },
            "destination item lengths",
        ),
    ],
)
def test_what_this_node_cannot_do_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    """sglang PR 21591: a relaxed check could hide a real mismatch."""
    h = Harness()
    h.receive(request(**changes))
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert reason in failed.reason
    assert h.node.num_entries == 0


def test_a_step_that_cannot_be_computed_costs_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    h.receive(request())
    monkeypatch.setattr(h.prefill, "step", lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    h.prefill._start_waiting()
    h.compute()
    [failed] = h.control.take(PrefillFailed)
    assert isinstance(failed, PrefillFailed)
    assert "out of memory" in failed.reason
    assert h.free_pages == 8
