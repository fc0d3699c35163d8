"""The decode side of the overlap measurement: what a decode node does between asking for a prompt and admitting it."""

import queue
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from base.metrics import Metrics
from benchmarks.stepping import tiers_of_one
from benchmarks.transfer.methods import MethodFailed
from benchmarks.transfer.overlap_model import spec
from control.messages import ChunkDone, Generate, Message, Peer, PrefillDone
from control.plane import ControlPlane
from decode_node.attempt import ChunkNumber, chunk_of
from decode_node.pools import destination_of
from decode_node.remote_prefill import PrefillMessage, RemotePrefill
from decode_node.request import Request, RequestState
from decode_node.verifier import ChecksumTask, Verification, Verifier
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from service.checkpoint import identity_of
from transfer.transports import Transports

_PATIENCE_S = 0.02
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Admission:
    """ready_at: when the prompt had landed and was verified, so that nothing kept it from its admission any more
    (time.monotonic). admission_seconds: what `admit_request_direct` took then, which copies index keys to the device.
    transfer_seconds: what the prefill node spent on sending, waits for layers left out.
    """

    ready_at: float
    admission_seconds: float
    transfer_seconds: float
    num_bytes: int
    checksums: int


class DecodeSide:
    """Asks a prefill node for one prompt at a time."""

    def __init__(self, host: str, transports: Transports, prefill: Peer, tokens: int) -> None:
        self._prefill = prefill
        self._tokens = tokens
        self._inbox: queue.SimpleQueue[tuple[Peer, Message] | ChecksumTask] = queue.SimpleQueue()
        self._requests = 0
        self._at_end = ExitStack()
        self._coordinator = _tiers(tokens, transports.share_memory)
        self._at_end.callback(self._coordinator.close)
        pool = self._coordinator.host
        destination = destination_of(pool, transports, identity_of(spec(tokens)))
        transports.register(destination.buffers)
        self._at_end.callback(transports.unregister, destination.buffers)
        self._control = ControlPlane("decode", host, 0, host, deliver=lambda *item: self._inbox.put(item))
        self._at_end.callback(self._control.stop)
        verifier = Verifier(destination.buffers, self._inbox.put)
        self._at_end.callback(verifier.close)
        self._remote = RemotePrefill(
            self._control,
            destination,
            pool,
            transports.cut,
            verifier.submit,
            Metrics(),
            patience=_TIMEOUT_S,
            on_lost=_raise_lost,
        )
        self._control.start()

    def admit_one(self) -> Admission:
        """Have a prompt prefilled, wait until it has landed and is verified, admit it, and let it go again."""
        self._requests += 1
        # One token more than is prefilled.
        prompt = tuple(i % 16 for i in range(self._tokens + 1))
        generate = Generate(request_id=f"overlap-{self._requests}", prompt_ids=prompt, max_new_tokens=2)
        request = Request(generate, gateway=self._control.me)
        slots = self._coordinator.host.allocate(self._tokens)
        assert slots is not None
        self._remote.dispatch(request, self._prefill, slots)
        done, checksums = self._landed(request)
        ready_at = time.monotonic()
        assert request.host_slots is not None
        if not self._coordinator.admit_request_direct(request.request_id, request.host_slots, request.kv_tokens):
            raise MethodFailed("the device pool has no room for the prompt")
        admission_seconds = time.monotonic() - ready_at
        self._coordinator.release_host(self._coordinator.retract_request(request.request_id))
        return Admission(ready_at, admission_seconds, done.transfer_seconds, done.transferred_bytes, checksums)

    def close(self) -> None:
        self._at_end.close()

    def _landed(self, request: Request) -> tuple[PrefillDone, int]:
        """Serve messages, as a node's loop does, until the request's KV is there: (what was said then, checksums)."""
        done: PrefillDone | None = None
        checksums: dict[ChunkNumber, int] = {}
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            self._remote.tick(time.monotonic())
            try:
                item = self._inbox.get(timeout=_PATIENCE_S)
            except queue.Empty:
                continue
            match item:
                case Verification():
                    self._remote.verified(item)
                case (sender, message):
                    if isinstance(message, ChunkDone | PrefillDone):
                        checksums[chunk_of(message)] = len(message.checksums)
                    if isinstance(message, PrefillDone):
                        done = message
                    if isinstance(message, PrefillMessage):
                        self._remote.take(sender, message)
            if request.state is RequestState.LANDED and done is not None:
                return done, sum(checksums.values())
        raise MethodFailed(f"{request.request_id} did not land within {_TIMEOUT_S:.0f} s")


def _raise_lost(request: Request, reason: str) -> None:
    raise MethodFailed(f"the prefill was lost: {reason}")


def _tiers(tokens: int, shareable: bool) -> HiSparseCoordinator:
    """The tiers of a decode node without an accelerator, with host slots for two prompts."""
    shape = spec(tokens)
    layout = shape.kv_layout
    config = HiSparseConfig(
        device_buffer_size=2 * shape.index_topk,
        top_k=shape.index_topk,
        host_to_device_ratio=None,
        host_pool_gib=2 * tokens * layout.token_bytes / 2**30,
    )
    return tiers_of_one(config, layout, shape.context_length, torch.device("cpu"), shareable)
