"""Sends computed chunks to decode nodes while the next ones compute."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from transfer.engine import KVTransferEngine, TransferAborted, TransferError
from transfer.messages import BufferInfo, Destination
from transfer.planner import Descriptors, Int64s, expand_pages, plan_runs

log = structlog.get_logger(__name__)


class Event(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Return when everything before it is done."""


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a request, to be written to the destination slots of those positions.

    `ready` is the event after which the device has written them (None: already has). `cancelled` is asked between
    descriptors.
    """

    request_id: str
    epoch: int
    start: int
    stop: int
    pages: Int64s
    slots: Int64s
    destination: Destination
    ready: Event | None
    cancelled: Callable[[], bool]


@dataclass(frozen=True)
class Sent:
    """A chunk's writes have all ended: landed, unless `error` says otherwise."""

    chunk: Chunk
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    error: str | None = None


class Sender:
    """One thread per destination session, so that a slow decode node delays only its own requests.

    `report` is called from those threads, once per chunk, when nothing of the chunk is in flight any more.
    """

    def __init__(
        self, engine: KVTransferEngine, source: BufferInfo, page_size: int, report: Callable[[Sent], None]
    ) -> None:
        self._engine = engine
        self._source = source
        self._page_size = page_size
        self._report = report
        self._workers: dict[str, queue.SimpleQueue[Chunk | None]] = {}
        self._threads: dict[str, threading.Thread] = {}

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk behind the earlier ones of its session."""
        session = chunk.destination.session
        if session not in self._workers:
            self._workers[session] = queue.SimpleQueue()
            self._threads[session] = threading.Thread(
                target=self._work, args=(self._workers[session],), name=f"send-{session}", daemon=True
            )
            self._threads[session].start()
        self._workers[session].put(chunk)

    def keep_only(self, sessions: set[str]) -> None:
        """End the threads of other sessions once their queues are empty; a later chunk starts a new one."""
        for session in self._workers.keys() - sessions:
            self._workers.pop(session).put(None)
            del self._threads[session]

    def stop(self, timeout: float) -> bool:
        """End all threads after the chunks that they hold. Whether they ended in time."""
        threads = list(self._threads.values())
        self.keep_only(set())
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _work(self, chunks: "queue.SimpleQueue[Chunk | None]") -> None:
        while (chunk := chunks.get()) is not None:
            self._report(self._send(chunk))

    def _send(self, chunk: Chunk) -> Sent:
        if chunk.cancelled():
            return Sent(chunk, error="aborted")
        if chunk.ready is not None:
            chunk.ready.synchronize()
        batch = self._plan(chunk)
        started = time.monotonic()
        try:
            self._engine.write(chunk.destination.session, batch, go_on=lambda: not chunk.cancelled())
        except TransferAborted:
            return Sent(chunk, error="aborted")
        except TransferError as error:
            log.warning("transfer failed", request_id=chunk.request_id, epoch=chunk.epoch, error=str(error))
            return Sent(chunk, error=str(error))
        return Sent(chunk, int(batch.lengths.sum()), len(batch.lengths), time.monotonic() - started)

    def _plan(self, chunk: Chunk) -> Descriptors:
        """The chunk's runs, laid over every layer."""
        target = chunk.destination.buffers
        runs = plan_runs(
            expand_pages(chunk.pages, self._page_size, chunk.start, chunk.stop), chunk.slots[chunk.start : chunk.stop]
        )
        layers = [
            runs.descriptors(source, destination, item)
            for source, destination, item in zip(self._source.ptrs, target.ptrs, self._source.item_lengths, strict=True)
        ]
        return Descriptors(*(np.concatenate(column) for column in zip(*layers, strict=True)))
