"""What tests of the prefill endpoint share: an engine whose computing and sending the test does, piece by piece."""

import math
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from base.metrics import Metrics
from control.messages import AttemptId, Destination, Message, Peer, PrefillRequest
from engine.chunked import ChunkedPrefill, PrefillStep
from kvcache.paged_pool import PagedKVPool
from prefill_node.compute import Computed
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.fetcher import FetchResources
from prefill_node.job import TransferJob
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.offer import Offer
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from prefill_node.sender import SendResources
from service.lifecycle import Lifecycle
from tests.identity import IDENTITY
from tests.prefill_node.fakes import LAYOUT, FakeControl, FakeModel
from transfer.memory import BufferInfo, Checksum, Session

DECODE = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")
TCP = (Session(transport="tcp", name="127.0.0.1:1"),)
BUFFERS = BufferInfo(ptrs=(1, 2, 3), lengths=(1600, 1600, 800), item_lengths=(16, 16, 8))
R = AttemptId("decode", "r", 1)


def checksum_of(start: int, stop: int) -> Checksum:
    return Checksum(buffer=0, start=start, stop=stop, digest=stop)


class HeldSender:
    """Keeps chunks until the test says that their writes ended."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

        self.full = False

    def submit(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def open(self, decode: Peer) -> bool:
        return not self.full

    def keep_only(self, boot_ids: set[str]) -> None:
        pass


class HeldCompute:
    """Keeps the step until the test computes it."""

    def __init__(self) -> None:
        self.step: PrefillStep[TransferJob] | None = None

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        assert self.step is None, "one step at a time"
        self.step = step
        return ForwardProgress(torch.device("cpu"))


class Harness:
    def __init__(self) -> None:
        self.control = FakeControl(heard={DECODE.boot_id: math.inf})
        self.sender = HeldSender()
        self.computing = HeldCompute()
        self.model = FakeModel()
        self.prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(
            self.model,  # type: ignore[arg-type]
            PagedKVPool(LAYOUT, num_pages=8, page_size=4, device=torch.device("cpu")),
            chunk_size=6,
        )
        self.lifecycle = Lifecycle(drain_timeout=30.0)
        self.left = False
        self.shell = SimpleNamespace(
            control=self.control,
            metrics=Metrics(),
            inbox=queue.SimpleQueue(),
            lifecycle=self.lifecycle,
            leave=lambda: setattr(self, "left", True),
        )
        self.engine = self.new_engine(
            EngineParts(
                prefill=self.prefill,
                device=torch.device("cpu"),
                resources=SendResources(reading=None, rings=None, connect=None, silence=None),  # type: ignore[arg-type]
                fetching=FetchResources(connect=None, silence=None, new_sink=None, page_size=4),  # type: ignore[arg-type]
                offer=Offer(IDENTITY, ("tcp",), max_tokens=32, vocab_size=100),
                metrics=self.shell.metrics,
                wake=lambda: None,
                transfer_timeout=30.0,
            )
        )
        self.engine._compute = self.computing  # type: ignore[assignment]
        self.engine._sender = self.sender  # type: ignore[assignment]
        self.start_step = self.engine._start_step
        self.engine._start_step = lambda: None  # type: ignore[method-assign]
        self.endpoint = PrefillEndpoint(self.shell, self.engine)  # type: ignore[arg-type]

    def new_engine(self, parts: EngineParts) -> ModelEngine:
        return ModelEngine(parts)

    def tell(self) -> None:
        """Let the endpoint say what has happened."""
        for update in self.engine.poll():
            self.endpoint._send_update(update)

    def receive(self, message: Message, sender: Peer | None = None) -> None:
        self.endpoint._take(sender or DECODE, message)
        self.tell()

    def start(self) -> None:
        """Let the engine start its next step."""
        self.start_step()

    def finish(self, error: str | None = None) -> None:
        """The step that was started ends."""
        step, self.computing.step = self.computing.step, None
        assert step is not None
        queued = {} if error else self.prefill.compute(step)
        logprobs = {job: found.wait() for job, found in queued.items()}
        self.engine._report(Computed(step, error, prompt_logprobs=logprobs))
        self.tell()

    def compute(self) -> None:
        self.start()
        self.finish()

    def sent(
        self,
        error: str | None = None,
        lingering: bool = False,
        posted_at: float = 0.0,
        ended_at: float = 0.0,
        waited: float = 0.0,
        checksums: bool = False,
        in_flight: bool = False,
    ) -> None:
        """The writes of the oldest chunk ended. With `checksums`, one of all its positions was noted."""
        chunk = self.sender.chunks.pop(0)
        noted = [checksum_of(chunk.start, chunk.stop)] if checksums else []
        sent = SendReport(chunk, 10, 1, posted_at, ended_at, waited, noted, error, lingering, in_flight)
        self.engine._report(sent)
        self.tell()

    def housekeep(self, now: float) -> None:
        self.endpoint._housekeep(now)
        self.engine._stop_late_transfers(now)
        self.tell()

    def script(self, *turns: Callable[[], object]) -> list[Callable[[], object]]:
        """What happens in the turns of `endpoint.run`, one after another; the list is empty when all of it has."""
        self.engine._start_step = self.start_step  # type: ignore[method-assign]
        left = list(turns)

        def receive(_: float) -> list[object]:
            if left:
                left.pop(0)()
            return []

        self.shell.receive = receive
        return left

    @property
    def free_pages(self) -> int:
        return self.prefill.pool.free_pages


def request(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "attempt": R,
        "token_ids": tuple(range(10)),
        "destination": Destination(identity=IDENTITY, buffers=BUFFERS, sessions=TCP),
        "extents": ((0, 10),),
        "hisparse": True,
    }
    return PrefillRequest(**{**fields, **changes})
