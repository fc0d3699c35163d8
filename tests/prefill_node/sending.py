"""A sender between a real pool and channels that copy late, for tests on either device."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import torch

from control.messages import AttemptId, Destination, Peer
from prefill_node.compute import ForwardProgress
from prefill_node.orders import BlockToSend, TransferReport
from prefill_node.pool_io import DeviceSource, HostSource, Reading, SendRings
from prefill_node.sender import Chunk, Sender
from tests.identity import IDENTITY
from transfer.choices import ChecksumMode, Transport
from transfer.copy_runs import copy_runs
from transfer.memory import BufferInfo
from transfer.planner import NO_LIMIT, Descriptors
from transfer.writer import Outcome, Pending

PAGE_SIZE, NUM_PAGES, NUM_SLOTS = 4, 600, 2600
LAYER_OF_BUFFER = (0, 1, 1)
"""Two layers of items, and the index keys of the second."""
ITEM_DIM = 1100
PARTS = 5
"""Send buffers that one layer of a whole chunk fills, at 4400 bytes per item."""
CPU = torch.device("cpu")


@dataclass
class LateChannel:
    """Reads the memory that it was given only when it is waited for, as a transport might."""

    transport: Transport
    max_batch: int = 16
    max_bytes: int = NO_LIMIT
    attempts: int = 1
    posted: list[Descriptors] = field(default_factory=list)
    hold: threading.Event | None = None
    error: Exception | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    """How the next batches end; those that come later land."""
    broken: str = ""
    """What of it raises: submit, wait, check or close."""
    closed: bool = False
    late: int = 0
    most_late: int = 0

    def submit(self, batch: Descriptors) -> Pending:
        self.break_in("submit")
        if self.hold is not None:
            self.hold.wait(10)
        self.posted.append(batch)
        self.late += 1
        self.most_late = max(self.most_late, self.late)
        return partial(self._land, batch)

    def _land(self, batch: Descriptors) -> Outcome:
        self.late -= 1
        self.break_in("wait")
        copy_runs(batch)
        return self.outcomes.pop(0) if self.outcomes else Outcome.LANDED

    def break_in(self, what: str) -> None:
        if self.broken == what:
            raise RuntimeError(f"a bug in {what}")

    def check(self) -> None:
        self.break_in("check")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True
        self.break_in("close")


class Sending:
    """A sender, its source pool, and the decode nodes' pools that it writes to."""

    def __init__(
        self, transport: Transport = "tcp", checksums: ChecksumMode = "full", device: torch.device = CPU
    ) -> None:
        rows = NUM_PAGES * PAGE_SIZE
        self.layers = [torch.rand(rows, dim, device=device) for dim in (ITEM_DIM, ITEM_DIM, 8)]
        if device.type == "cuda":
            torch.cuda.synchronize()  # the forward pass that is said to be over has written them
        source = HostSource(self.layers) if device.type == "cpu" else DeviceSource(self.layers)
        self.target = [torch.zeros(NUM_SLOTS, layer.shape[1]) for layer in self.layers]
        self.channels: dict[str, LateChannel] = {}
        self.transport = transport
        self.silence = 0.0
        self.reports: queue.SimpleQueue[TransferReport] = queue.SimpleQueue()
        self.registered: list[BufferInfo] = []
        self.connecting_error: Exception | None = None
        self.registering_is_broken = False
        self.reading = Reading(source, LAYER_OF_BUFFER, PAGE_SIZE, checksums)
        rings = SendRings(pin=device.type == "cuda", register=self._register)
        self.sender = Sender(self.reading, rings, self._connect, lambda _: self.silence)
        self._numbers = count(1)

    def destination(self) -> Destination:
        buffers = BufferInfo(
            ptrs=tuple(t.data_ptr() for t in self.target),
            lengths=tuple(t.nbytes for t in self.target),
            item_lengths=tuple(t.shape[1] * 4 for t in self.target),
        )
        return Destination(identity=IDENTITY, buffers=buffers)

    def channel(self, boot: str) -> LateChannel:
        return self.channels.setdefault(boot, LateChannel(self.transport))

    def _register(self, buffers: BufferInfo) -> None:
        if self.registering_is_broken:
            raise MemoryError("no pinned memory is left")
        self.registered.append(buffers)

    def _connect(self, destination: Destination) -> LateChannel:
        if self.connecting_error is not None:
            raise self.connecting_error
        boot = threading.current_thread().name.removeprefix("send-").removesuffix(":1")
        return self.channel(boot)

    def chunk(
        self,
        boot: str = "a",
        start: int = 0,
        stop: int = NUM_PAGES * PAGE_SIZE,
        pages: str = "scattered",
        slots: str = "contiguous",
        progress: ForwardProgress | None = None,
    ) -> Chunk:
        rng = np.random.default_rng(1)
        pages_of = rng.permutation(NUM_PAGES) if pages == "scattered" else np.arange(NUM_PAGES)
        slots_of = rng.permutation(NUM_SLOTS) if slots == "scattered" else np.arange(NUM_SLOTS)
        decode, work = Peer(role="decode", address=f"{boot}:1", boot_id=boot), next(self._numbers)
        attempt, to = AttemptId(boot, "r", 1), self.destination()
        write = BlockToSend(work, attempt, decode, to, start, stop, pages_of, slots_of[start:stop])
        return Chunk(write, self.reports.put, progress or done())

    def submit(self, chunk: Chunk) -> None:
        self.sender.submit(chunk)

    def send(self, chunk: Chunk) -> TransferReport:
        self.submit(chunk)
        return self.reports.get(timeout=10)

    def check_bytes(self, chunk: Chunk) -> None:
        """Every item of the chunk is at its slot, and every other slot is untouched."""
        positions = np.arange(chunk.block.start, chunk.block.stop)
        rows = chunk.block.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        for layer, target in zip(self.layers, self.target, strict=True):
            expected = torch.zeros_like(target)
            expected[chunk.block.slots] = layer[rows].cpu()
            assert torch.equal(target, expected)


def at_slots(write: BlockToSend) -> np.ndarray:
    """The slot of each position; it means nothing of those that are not written."""
    slots = np.zeros(NUM_PAGES * PAGE_SIZE, dtype=np.int64)
    slots[write.start : write.stop] = write.slots
    return slots


def done() -> ForwardProgress:
    """A forward pass that is over."""
    progress = ForwardProgress(CPU)
    for layer in range(2):
        progress.layer_done(layer)
    return progress


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
