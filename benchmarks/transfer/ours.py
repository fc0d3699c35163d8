"""This project's own way, as its nodes use it: the only file here that knows how it is put together."""

import os
import queue
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.transfer.cases import Case, Protocol
from benchmarks.transfer.methods import Group, MethodFailed, Run
from benchmarks.transfer.placement import Placement, Request
from benchmarks.transfer.pools import buffers_of, layout
from hisparse.host_pool import HostKVPool
from prefill_node.outgoing import Chunk, Outgoing, Reading, Sent
from prefill_node.plan import Part
from prefill_node.pool import PagedKVPool
from prefill_node.progress import ForwardProgress
from prefill_node.ring import SendRings
from prefill_node.sender import Sender, Surroundings
from prefill_node.source import HostSource
from transfer.checksum import ChecksumMode
from transfer.copy_runs import copy_runs
from transfer.messages import BufferInfo, Destination, ModelIdentity, Peer, SharedMemory, Transport
from transfer.planner import Descriptors
from transfer.routes import Transports
from transfer.shm import COPY_THREADS
from transfer.writer import Channel

__all__ = ["COPY_THREADS", "ReceivingPool", "Sending", "copy_runs", "source_pool"]

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
        region = self._pool.shared() if "shm" in transports.offered else None
        self.destination = Destination(
            identity=_identity(layers, item_bytes),
            buffers=self.buffers,
            sessions=transports.sessions,
            shared=None
            if region is None
            else SharedMemory(pid=os.getpid(), fd=region.fd, name=region.name, base=region.base, length=region.length),
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
    """All chunks of all requests are computed already and handed over at once."""

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
        self._reading = reading
        self._rings = rings
        self._reports: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self._sender = Sender(
            Surroundings(reading=reading, rings=rings, connect=connect, silence=lambda _: 0.0, report=self._reports.put)
        )
        self._computed = ForwardProgress(torch.device("cpu"))
        for layer in range(case.layers):
            self._computed.layer_done(layer)

    def run(self) -> Run:
        """Raises MethodFailed. Planning goes on inside the sender, so it is timed apart, after the transfer."""
        spans = [
            (request, start, min(start + CHUNK_TOKENS, self._case.tokens))
            for start in range(0, self._case.tokens, CHUNK_TOKENS)
            for request in self.placement.requests
        ]
        started = time.perf_counter()
        for number, (request, start, stop) in enumerate(spans):
            self._sender.submit(self._chunk(number, request, start, stop))
        try:
            sent = [self._reports.get(timeout=_TIMEOUT_S) for _ in spans]
        except queue.Empty:
            raise MethodFailed(f"a chunk was not sent within {_TIMEOUT_S:.0f} s") from None
        seconds = time.perf_counter() - started
        if errors := {one.error for one in sent if one.error}:
            raise MethodFailed("; ".join(sorted(errors)))
        return Run(seconds, self._planning([one.chunk for one in sent]), sum(one.num_descriptors for one in sent))

    def _planning(self, chunks: list[Chunk]) -> float:
        """Seconds that the same chunks take where nothing is copied or written."""
        rehearsal = _Rehearsal(self._case.protocol.value, self._reading.source.buffers)
        reading = replace(self._reading, source=rehearsal, checksums="off")
        ring = self._rings.lend()
        started = time.perf_counter()
        for chunk in chunks:
            Outgoing(chunk, reading, rehearsal, lambda: ring).run(may_post=lambda: True)
        seconds = time.perf_counter() - started
        self._rings.take_back(ring)
        return seconds

    def close(self) -> None:
        self._sender.stop(timeout=5.0)

    def _chunk(self, number: int, request: Request, start: int, stop: int) -> Chunk:
        return Chunk(
            request_id=str(number),
            epoch=1,
            start=start,
            stop=stop,
            pages=request.pages,
            slots=request.slots,
            decode=_TARGET,
            destination=self._destination,
            progress=self._computed,
            cancelled=lambda: False,
        )


class _Rehearsal:
    """A channel and a source over which nothing goes: what remains of sending is planning."""

    max_batch = 1 << 20
    in_host_memory = True

    def __init__(self, transport: Transport, source: BufferInfo) -> None:
        self.transport = transport
        self.buffers = source

    def submit(self, batch: Descriptors) -> "_Rehearsal":
        return self

    def wait(self) -> int:
        return 0

    def gather(self, buffer: int, part: Part, into: torch.Tensor) -> None:
        """Packing is part of sending."""

    def digest(self, buffer: int, part: Part, start: int, stop: int) -> int:
        raise NotImplementedError("checksums are off")

    def check(self) -> None: ...

    def close(self) -> None: ...


def _identity(layers: int, item_bytes: int) -> ModelIdentity:
    return ModelIdentity(
        fingerprint="benchmark",
        dtype="uint8",
        num_layers=layers,
        num_index_layers=0,
        item_bytes=item_bytes,
        index_key_bytes=0,
    )
