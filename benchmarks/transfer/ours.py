"""This project's own way, as its nodes use it: the only file here that knows how it is put together."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from benchmarks.transfer.cases import Case, Group, Protocol
from benchmarks.transfer.methods import MethodFailed, Run
from benchmarks.transfer.placement import Placement, Request
from benchmarks.transfer.pools import buffers_of, layout
from control.messages import AttemptId, Destination, ModelIdentity, Peer
from kvcache.host_pool import HostKVPool
from kvcache.paged_pool import PagedKVPool
from prefill_node.compute import ForwardProgress
from prefill_node.orders import BlockToSend, TransferReport
from prefill_node.plan import ChunkPart
from prefill_node.pool_io import HostSource, Reading, SendBuffer, SendRings
from prefill_node.sender import Chunk, Sender
from transfer.choices import ChecksumMode, Transport
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo
from transfer.planner import NO_LIMIT, Descriptors
from transfer.transports import Transports
from transfer.writer import Channel, Outcome, Pending

CHUNK_TOKENS = 2048
"""As many as a prefill node computes at a time by default."""

_TARGET = Peer(role="decode", address="target:1", boot_id="target")
_TIMEOUT_S = 300.0


def source_pool(layers: int, rows: int, item_bytes: int) -> torch.Tensor:
    """The memory of a prefill node's pool, uint8 [layers, rows, item_bytes]."""
    return PagedKVPool(layout(layers, item_bytes), num_pages=rows, page_size=1, device=torch.device("cpu")).kv


class ReceivingPool:
    """The target's side: a decode node's host pool, offered over one transport."""

    def __init__(self, transports: Transports, layers: int, rows: int, item_bytes: int) -> None:
        self._transports = transports
        self._pool = HostKVPool(layout(layers, item_bytes), rows, pin=False, shareable=True)
        self.kv = self._pool.kv
        self.buffers = buffers_of(self.kv)
        transports.register(self.buffers)
        self.destination = Destination(
            identity=_identity(layers, item_bytes),
            buffers=self.buffers,
            sessions=transports.sessions,
            shared=self._pool.shared() if transports.share_memory else None,
        )

    def close(self) -> None:
        self._transports.unregister(self.buffers)
        self._pool.close()


class Sending:
    """The initiator's side: a prefill node's transports and send buffers, and the pool that is sent from."""

    def __init__(self, host: str, protocol: Protocol, ib_device: str, checksums: ChecksumMode) -> None:
        self._transports = Transports(host, protocol.value, ib_device)
        self._rings = SendRings(pin=False, register=self._transports.register)
        self._checksums = checksums

    @property
    def mooncake(self) -> Any:
        """The engine that carries what is sent. Shared memory takes none."""
        [engine] = self._transports.endpoints.values()
        assert isinstance(engine, KVTransferEngine), "shared memory has none"
        return engine.mooncake

    def register(self, buffers: BufferInfo) -> None:
        self._transports.register(buffers)

    def unregister(self, buffers: BufferInfo) -> None:
        self._transports.unregister(buffers)

    def method(self, case: Case, placement: Placement, kv: torch.Tensor, destination: Destination) -> "Ours":
        """The sender of a prefill node whose pool is kv, uint8 [layers, rows, item_bytes]."""
        reading = Reading(
            source=HostSource(kv.unbind(0)),
            layer_of_buffer=tuple(range(case.layers)),
            page_size=placement.page_size,
            checksums=self._checksums,
        )
        return Ours(case, placement, destination, reading, self._rings, self._transports.connect)


class Ours:
    """All chunks of all requests are computed already and handed over at once.

    Planning goes on inside the sender, between copies and writes, so it is timed apart: after each transfer the same
    chunks go through a sender whose channel and source do nothing.
    """

    name = "ours"
    group = Group.OURS

    def __init__(
        self,
        case: Case,
        placement: Placement,
        destination: Destination,
        reading: Reading,
        rings: SendRings,
        connect: Callable[[Destination], Channel],
    ) -> None:
        self.placement = placement
        self._case = case
        self._destination = destination
        self._numbers = count(1)
        self._computed = ForwardProgress(torch.device("cpu"))
        for layer in range(case.layers):
            self._computed.layer_done(layer)
        nothing = _Nothing(case.protocol.value, reading.source.buffers)
        self._sending = _Timed(reading, rings, connect)
        self._planning = _Timed(replace(reading, source=nothing, checksums="off"), rings, lambda _: nothing)

    def run(self) -> Run:
        chunks = [
            self._chunk(request, start)
            for start in range(0, self._case.tokens, CHUNK_TOKENS)
            for request in self.placement.requests
        ]
        seconds, sent = self._sending.send(chunks)
        planning_seconds, _ = self._planning.send(chunks)
        return Run(seconds, planning_seconds, sum(one.num_descriptors for one in sent))

    def close(self) -> None:
        for sender in (self._sending, self._planning):
            sender.close()

    def _chunk(self, request: Request, start: int) -> Chunk:
        stop = min(start + CHUNK_TOKENS, self._case.tokens)
        block = BlockToSend(
            work=next(self._numbers),
            attempt=AttemptId(_TARGET.boot_id, "benchmark", 1),
            decode=_TARGET,
            destination=self._destination,
            start=start,
            stop=stop,
            pages=request.pages,
            slots=request.slots[start:stop],
        )
        return Chunk(block, lambda report: None, self._computed)


class _Timed:
    """A sender and its reports."""

    def __init__(self, reading: Reading, rings: SendRings, connect: Callable[[Destination], Channel]) -> None:
        self._reports: queue.SimpleQueue[TransferReport] = queue.SimpleQueue()
        self._sender = Sender(reading, rings, connect, silence=lambda _: 0.0)

    def send(self, chunks: Sequence[Chunk]) -> tuple[float, list[TransferReport]]:
        """Seconds from the first submission to the last report, and the reports. Raises MethodFailed."""
        started = time.perf_counter()
        for chunk in chunks:
            self._sender.submit(replace(chunk, report=self._reports.put))
        try:
            sent = [self._reports.get(timeout=_TIMEOUT_S) for _ in chunks]
        except queue.Empty:
            raise MethodFailed(f"a chunk was not sent within {_TIMEOUT_S:.0f} s") from None
        seconds = time.perf_counter() - started
        if errors := {one.error for one in sent if one.error}:
            raise MethodFailed("; ".join(sorted(errors)))
        return seconds, sent

    def close(self) -> None:
        self._sender.stop(timeout=5.0)


class _Nothing(HostSource):
    """A channel and a source that do nothing: what remains of sending is planning."""

    max_batch = NO_LIMIT
    max_bytes = NO_LIMIT
    attempts = 1
    in_host_memory = True

    def __init__(self, transport: Transport, source: BufferInfo) -> None:
        self.transport = transport
        self.buffers = source

    def submit(self, batch: Descriptors) -> Pending:
        return lambda: Outcome.LANDED

    def gather(self, buffer: int, part: ChunkPart, into: SendBuffer) -> None:
        """Packing is part of sending."""

    def digest(self, buffer: int, part: ChunkPart, start: int, stop: int) -> int:
        raise AssertionError("nothing asks for digests: checksums are off")

    def check(self) -> None: ...

    def close(self) -> None: ...


def _identity(layers: int, item_bytes: int) -> ModelIdentity:
    return ModelIdentity(
        fingerprint="benchmark",
        dtype="uint8",
        kv_format="uint8",
        draft_layer=False,
        num_layers=layers,
        num_index_layers=0,
        item_bytes=item_bytes,
        index_key_bytes=0,
    )
