"""A prefill node in one process: its endpoint, its planner, and workers of one or several ranks.

In a `World` the workers do nothing until the test says so. In a `LiveWorld` they compute with a model of which every
byte is known, and send to and read from a decode node's pool, with threads of their own.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from base.metrics import FetchFailure, Metrics
from control.messages import (
    AttemptId,
    ChunkDone,
    Destination,
    Message,
    ModelIdentity,
    Peer,
    PrefillDone,
    PrefillRequest,
)
from engine.chunked import ChunkedPrefill, compute_chunks
from kvcache.layout import KVLayout, buffer_info
from kvcache.page_cache import PageCache, can_cache
from kvcache.paged_pool import PagedKVPool, PagedSequence
from kvcache.prefix_cache import PrefixCache
from model.passes import PrefillChunk
from prefill_node.attempt import HeldAttempt, Update
from prefill_node.config import FetchPolicy
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.offer import Offer
from prefill_node.orders import (
    OF_FIRST,
    OF_OTHERS,
    BlockToRead,
    BlockToSend,
    CancelTransfers,
    Gather,
    LayersRead,
    Order,
    Report,
    Step,
    StepChunk,
    StepEnded,
    TransferReport,
)
from prefill_node.planner import PrefillPlanner
from prefill_node.worker import PrefillWorker
from ranks.barrier import GroupFailed
from ranks.executor import Executor, Worker
from ranks.group import SingleRank
from service.lifecycle import Lifecycle
from tests.identity import IDENTITY
from tests.prefill_node.fakes import LAYOUT, ME, FakeControl, FakeModel
from tests.prefill_node.sending import CPU, LateChannel
from transfer.choices import ChecksumMode
from transfer.memory import BufferInfo, Checksum, Session

DECODE = ME
TCP = (Session(transport="tcp", name="127.0.0.1:1"),)
BUFFERS = BufferInfo(ptrs=(1, 2, 3), lengths=(1600, 1600, 800), item_lengths=(16, 16, 8))
R = AttemptId("decode", "r", 1)
VOCAB = 100
NUM_SLOTS = 1024
UNTOUCHED = 255
TOKEN_BYTES = LAYOUT.token_bytes
UpdateT = TypeVar("UpdateT", bound=Message)


def destination(**changes: Any) -> Destination:
    fields: dict[str, Any] = {"identity": IDENTITY, "buffers": BUFFERS, "sessions": TCP}
    return Destination(**{**fields, **changes})


def request(**changes: Any) -> PrefillRequest:
    fields: dict[str, Any] = {
        "attempt": R,
        "token_ids": tuple(range(10)),
        "last_token_id": 10,
        "destination": destination(),
        "extents": ((0, 10),),
        "hisparse": True,
    }
    return PrefillRequest(**{**fields, **changes})


def checksum_of(start: int, stop: int) -> Checksum:
    return Checksum(buffer=0, start=start, stop=stop, digest=stop)


def new_cache(num_pages: int = 16, page_size: int = 16) -> PageCache:
    """A cache, which is off where pages are no parts of blocks."""
    return PageCache(PagedKVPool(LAYOUT, num_pages, page_size, CPU), can_cache(page_size))


class FakeRanks(SingleRank):
    """A rank's side of a group in which nothing waits."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(CPU)
        self.rank, self.world_size = rank, world_size
        self.ended: int | None = None
        self.reported = ""

    def check(self) -> None:
        if self.ended is not None:
            raise GroupFailed(f"rank {self.ended} ended")

    def failure(self, error: Exception) -> Exception:
        return GroupFailed(f"rank {self.rank} failed in step 1: {error}")

    def report(self, reason: str) -> None:
        self.reported = reason


class Node:
    """Endpoint and planner between a fake control plane and workers."""

    def __init__(
        self,
        cache: PageCache,
        chunk_size: int,
        new_worker: Callable[[Callable[[Report], None]], Worker[Order]],
        lines: Sequence[object],
        fetch_policy: FetchPolicy,
        max_tokens: int = 512,
        wake: Callable[[], None] = lambda: None,
        identity: ModelIdentity = IDENTITY,
    ) -> None:
        """lines: to the other ranks; each can `send`."""
        self.prefill: ChunkedPrefill[HeldAttempt] = ChunkedPrefill(cache.pool, chunk_size, cache)
        self.pool, self.cache = cache.pool, cache
        self.ranks = FakeRanks(0, 1 + len(lines))
        self.control = FakeControl(heard={DECODE.boot_id: math.inf})
        self.lifecycle = Lifecycle(drain_timeout=30.0)
        self.metrics = Metrics()
        self.has_left = False
        self.shell = SimpleNamespace(
            control=self.control,
            metrics=self.metrics,
            inbox=queue.SimpleQueue(),
            lifecycle=self.lifecycle,
            leave=lambda: setattr(self, "has_left", True),
        )
        self.executor: Executor[Order, Report] = Executor(self.ranks, new_worker, OF_FIRST, wake)
        self.executor._lines = list(lines)  # type: ignore[arg-type]
        offer = Offer(identity, ("tcp",), max_tokens=max_tokens, vocab_size=VOCAB)
        self.planner = PrefillPlanner(self.prefill, self.executor, offer, self.metrics, 30.0, fetch_policy)
        self.held = self.planner.held
        self.fetches = self.planner._fetches
        self.endpoint = PrefillEndpoint(self.shell, self.planner, self.ranks)  # type: ignore[arg-type]
        self.updates: list[Update] = []
        """All that the decode node was told of attempts."""
        self._poll, self.planner.poll = self.planner.poll, self._noting_poll  # type: ignore[method-assign]

    @property
    def prefixes(self) -> PrefixCache:
        assert self.cache.prefixes is not None
        return self.cache.prefixes

    def _noting_poll(self) -> list[Update]:
        self.updates += (found := self._poll())
        return found

    def tell(self) -> None:
        """A turn of the loop without messages."""
        self.endpoint._send_updates()

    def receive(self, *messages: Message, sender: Peer = DECODE) -> None:
        for message in messages:
            self.endpoint._take(sender, message)
        self.tell()

    def be_late(self) -> None:
        """All fetches take too long."""
        for attempt in self.held.values():
            if attempt.fetch is not None:
                attempt.fetch.until = 0.0
        self.tell()

    def metric(self, name: str, **labels: str) -> float:
        self.planner.refresh_metrics()
        value = self.metrics.registry.get_sample_value(f"hisparse_pd_{name}", labels)
        assert value is not None
        return value

    @property
    def repeated(self) -> list[Message]:
        """What is said to the decode node again and again."""
        return [message for _, message in self.control.repeated.values()]

    def only(self, kind: type[UpdateT]) -> UpdateT:
        """The one message that is said again and again."""
        [message] = self.repeated
        assert isinstance(message, kind)
        return message

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages


class HeldWorker:
    """Keeps what it is ordered until the test says that it has ended. Also the line to such a worker."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.step: Step | Gather | None = None
        self.writes: list[BlockToSend] = []
        self.reads: list[BlockToRead] = []
        self.cancelled: set[int] = set()

    def take(self, order: Order) -> None:
        self.orders.append(order)
        match order:
            case Step(writes=writes):
                assert self.step is None, "one step at a time"
                self.step = order
                self.writes += writes
            case Gather():
                assert self.step is None, "one step at a time"
                self.step = order
            case BlockToSend():
                self.writes.append(order)
            case BlockToRead():
                self.reads.append(order)
            case CancelTransfers(works=works):
                self.cancelled |= set(works)

    send = take

    def close(self, timeout: float) -> bool:
        return True


class World(Node):
    """A prompt of 10 tokens is computed in steps of 6 and 4. A step begins when the test says so."""

    def __init__(
        self,
        world_size: int = 1,
        cache: PageCache | None = None,
        chunk_size: int = 6,
        fetch_policy: FetchPolicy = "never",
        max_tokens: int = 512,
    ) -> None:
        self.model = FakeModel()
        self.workers = [HeldWorker() for _ in range(world_size)]
        cache = cache or new_cache(8, 4)
        super().__init__(cache, chunk_size, lambda _: self.workers[0], self.workers[1:], fetch_policy, max_tokens)
        self._start_step, self.planner._start_step = self.planner._start_step, lambda: None  # type: ignore[method-assign]

    @property
    def writes(self) -> list[BlockToSend]:
        """Of rank 0."""
        return self.workers[0].writes

    @property
    def step(self) -> Step | Gather | None:
        return self.workers[0].step

    def is_cancelled(self, write: BlockToSend) -> bool:
        return write.work in self.workers[0].cancelled

    def start(self) -> None:
        self._start_step()

    def finish(self, error: str | None = None, void: frozenset[int] = frozenset(), **fields: Any) -> None:
        """The step that was started ends."""
        step = self.step
        assert step is not None
        for worker in self.workers:
            worker.step = None
        if isinstance(step, Step) and error is None:
            chunks = [self._chunk(chunk) for chunk in step.chunks]
            wanted = [chunk.alternatives for chunk in step.chunks]
            queued = compute_chunks(self.model, chunks, wanted)  # type: ignore[arg-type]
            fields["prompt_logprobs"] = {number: found.wait() for number, found in queued.items()}
        self.executor.report(0, StepEnded(step.number, error, void=void, **fields))
        self.tell()

    def compute(self) -> None:
        self.start()
        self.finish()

    def sent(self, rank: int = 0, at: int = 0, checksums: bool = False, **fields: Any) -> None:
        """The writes of a rank's oldest block, or its block number `at`, ended. checksums: one of all its positions."""
        write = self.workers[rank].writes.pop(at)
        noted = [checksum_of(write.start, write.stop)] if checksums else []
        report = TransferReport(write.work, num_bytes=10, num_descriptors=1, posted_at=0.0, checksums=noted)
        vars(report).update(fields)
        self.executor.report(rank, report)
        self.tell()

    def read(self, rank: int = 0, at: int = 0, **fields: Any) -> None:
        """The reads of a rank's oldest block, or its block number `at`, ended."""
        read = self.workers[rank].reads.pop(at)
        failure: FetchFailure | None = "read" if fields.get("error") else None
        self.executor.report(rank, TransferReport(read.work, failure=failure, **fields))
        self.tell()

    def layers_come(self, at: int = 0, layers: int = 1) -> None:
        now = time.monotonic()
        self.executor.report(0, LayersRead(self.workers[0].reads[at].work, layers, now, now))
        self.tell()

    def housekeep(self, now: float) -> None:
        self.endpoint._housekeep(now)
        self.planner._stop_late_transfers(now)
        self.tell()

    @classmethod
    def sending(cls, world_size: int = 1) -> "World":
        """A prompt is computed, in two steps, and is being sent."""
        world = cls(world_size)
        world.receive(request())
        world.compute()
        world.compute()
        return world

    def script(self, *turns: Callable[[], object]) -> list[Callable[[], object]]:
        """What happens in the turns of `endpoint.run`, one after another; the list is empty when all of it has."""
        self.planner._start_step = self._start_step  # type: ignore[method-assign]
        left = list(turns)

        def receive(_: float) -> list[object]:
            if left:
                left.pop(0)()
            return []

        self.shell.receive = receive
        return left

    def _chunk(self, chunk: StepChunk) -> PrefillChunk:
        pages = PagedSequence(self.pool, chunk.pages)
        ids, next_ids = torch.from_numpy(chunk.token_ids), torch.from_numpy(chunk.next_ids)
        return PrefillChunk(ids, next_ids, chunk.start, chunk.sequence_length, pages)


# --- with workers that work ---


def states_of(tokens: Sequence[int]) -> list[int]:
    """What RunningModel writes for each position, before the layer's number is added."""
    states, state = [], 0
    for token in tokens:
        state = (state * 31 + token + 1) % 200
        states.append(state)
    return states


class RunningModel:
    """Each position's KV depends on all tokens up to it, by way of the KV of the position before it.

    computed: positions of each forward pass, by the sum of which a test knows what was computed.
    """

    def __init__(self) -> None:
        self.computed: list[list[tuple[int, int]]] = []
        self.error: Exception | None = None
        self.before_pass: Callable[[], object] = lambda: None

    @property
    def tokens(self) -> int:
        return sum(stop - start for chunks in self.computed for start, stop in chunks)

    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None], kv_only: bool) -> None:
        self.before_pass()
        self.computed.append([(chunk.start, chunk.stop) for chunk in chunks])
        for layer in range(LAYOUT.num_layers):
            for chunk in chunks:
                rows = chunk.cache.rows(max(0, chunk.start - 1), chunk.stop)
                held = chunk.cache.kv(layer)
                state = 0
                if chunk.start:
                    # Of layer 0 in every layer: a layer's KV depends on that of earlier positions in layers before it.
                    state, rows = int(chunk.cache.kv(0)[rows[0]][0]), rows[1:]
                for row, token in zip(rows, chunk.token_ids.tolist(), strict=True):
                    state = (state * 31 + token + 1) % 200
                    held[row] = state + layer
                    if layer == 0:
                        chunk.cache.index_keys(0)[row] = state
            if layer and self.error is not None:
                error, self.error = self.error, None
                raise error
            on_layer(layer)


class Slots:
    """A decode node's pool."""

    def __init__(self, layout: KVLayout, identity: ModelIdentity) -> None:
        sizes = [layout.item_bytes] * layout.num_layers + [layout.index_key_bytes] * layout.num_index_layers
        self.layers = [torch.full((NUM_SLOTS, size), UNTOUCHED, dtype=torch.uint8) for size in sizes]
        self.destination = destination(identity=identity, buffers=buffer_info(self.layers))

    def wipe(self) -> None:
        for layer in self.layers:
            layer.fill_(UNTOUCHED)

    def check(self, tokens: Sequence[int], start: int, extents: tuple[tuple[int, int], ...]) -> None:
        """The KV of positions from `start` on is in the slots of these extents, and nothing is elsewhere."""
        slots = [slot for first, length in extents for slot in range(first, first + length)][: len(tokens) - start]
        states = torch.tensor(states_of(tokens)[start:], dtype=torch.uint8)
        for layer, added in zip(self.layers, (0, 1, 0), strict=True):
            expected = torch.full_like(layer, UNTOUCHED)
            expected[slots] = (states + added)[:, None]
            assert torch.equal(layer, expected)


class ThreadExchange:
    """Gathers what as many threads bring."""

    def __init__(self, size: int) -> None:
        self.gathers = 0
        """Rounds that were completed."""
        self._brought: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        self._brought[rank] = rows
        if self._barrier.wait() == 0:
            assert len({len(each) for each in self._brought}) == 1, "collectives need equal numbers"
            self.gathers += 1
        gathered = torch.cat(self._brought)
        self._barrier.wait()
        return gathered


class LiveRank:
    """A rank with a pool, a model and channels of its own. Orders and reports of ranks other than 0 go as bytes."""

    def __init__(
        self, rank: int, pool: PagedKVPool, checksums: ChecksumMode, exchange: ThreadExchange, model: Any
    ) -> None:
        self.rank, self.pool, self.model = rank, pool, model
        self.channel, self.reads = LateChannel("tcp"), LateChannel("tcp")
        self.silence = 0.0
        self.connect_reads: Callable[[], LateChannel] = lambda: self.reads
        self.failed: str | None = None
        self._gather, self._checksums = partial(exchange.gather, rank), checksums

    def start(self, report: Callable[[Report], None]) -> PrefillWorker:
        transports = SimpleNamespace(
            register=lambda _: None,
            connect=lambda _, reading=False: self.connect_reads() if reading else self.channel,
        )
        self.worker = PrefillWorker(
            self.model,
            self.pool,
            transports,  # type: ignore[arg-type]
            lambda _: self.silence,
            self._checksums,
            self._gather,
            FakeRanks(self.rank),
            report,
        )
        return self.worker

    def start_far(self, report: Callable[[int, Report], None]) -> None:
        """As a rank other than 0: what it reports goes as bytes."""

        def said(found: Report) -> None:
            if isinstance(found, TransferReport):
                report(self.rank, OF_FIRST.decode(OF_OTHERS.encode(found)))
            elif isinstance(found, StepEnded):
                self.failed = found.error

        self.start(said)

    def send(self, order: Order) -> None:
        self.worker.take(OF_OTHERS.decode(OF_FIRST.encode(order)))


class LiveWorld(Node):
    """It sends to the slots of one decode node, over channels that copy."""

    def __init__(
        self,
        cache: PageCache,
        chunk_size: int = 32,
        checksums: ChecksumMode = "full",
        fetch_policy: FetchPolicy = "never",
        world_size: int = 1,
        new_model: Callable[[int, ThreadExchange], Any] = lambda rank, exchange: RunningModel(),
        identity: ModelIdentity = IDENTITY,
    ) -> None:
        """new_model: of a rank."""
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.exchange = ThreadExchange(world_size)
        pools = [cache.pool] + [
            PagedKVPool(cache.pool.layout, cache.pool.num_pages, cache.pool.page_size, CPU)
            for _ in range(1, world_size)
        ]
        self.all = [
            LiveRank(rank, pool, checksums, self.exchange, new_model(rank, self.exchange))
            for rank, pool in enumerate(pools)
        ]
        self.first, *self.others = self.all
        self.model, self.channel = self.first.model, self.first.channel
        wake = partial(self._woken.put, None)
        super().__init__(cache, chunk_size, self.first.start, self.others, fetch_policy, wake=wake, identity=identity)
        for each in self.others:
            each.start_far(self.executor.report)
        self.slots = Slots(cache.pool.layout, identity)
        self.hold = threading.Event()
        self._requests = 0

    @property
    def reads(self) -> LateChannel:
        return self.first.reads

    def ask(
        self,
        tokens: Sequence[int],
        start: int = 0,
        extents: tuple[tuple[int, int], ...] | None = None,
        salt: str = "",
        decode: Peer = DECODE,
        last_token: int = 10,
    ) -> AttemptId:
        """Start a prefill."""
        self._requests += 1
        asked = request(
            attempt=AttemptId(decode.boot_id, f"r{self._requests}", 1),
            token_ids=tuple(tokens),
            last_token_id=last_token,
            start=start,
            destination=self.slots.destination,
            extents=extents or ((0, len(tokens) - start),),
            cache_salt=salt,
        )
        assert self.planner.rejection_reason(decode, asked) is None
        self.planner.start(decode, asked)
        return asked.attempt

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"there were {self.updates}"
            with suppress(queue.Empty):
                self._woken.get(timeout=0.01)
            self.tell()

    def told(self, kind: type[UpdateT], attempt: AttemptId | None = None) -> list[UpdateT]:
        """What the decode node was told, of an attempt or of all."""
        updates = [each for each in self.updates if attempt in (None, each.attempt)]
        return [each for each in updates if isinstance(each, kind)]

    def until(self, kind: type[UpdateT], attempt: AttemptId) -> UpdateT:
        """Turn the loop until this is told of an attempt."""
        self.turn_until(lambda: bool(self.told(kind, attempt)))
        return self.told(kind, attempt)[-1]

    def until_computed(self, attempt: AttemptId, tokens: int) -> None:
        self.turn_until(lambda: self.held[attempt].computed >= tokens)

    def done(self, attempt: AttemptId) -> PrefillDone:
        return self.until(PrefillDone, attempt)

    def stop(self, attempt: AttemptId, reason: str | None = None) -> bool:
        return self.planner.stop(self.held[attempt], reason)

    def release(self, attempt: AttemptId) -> None:
        """The decode node has admitted the request."""
        assert self.planner.release(self.held[attempt])
        self.endpoint._finish(self.held[attempt])

    def checksums_of(self, attempt: AttemptId) -> list[Checksum]:
        """All that the decode node was told of an attempt, in order of positions."""
        found = [update.checksums for update in self.told(ChunkDone, attempt)]
        found += [update.checksums for update in self.told(PrefillDone, attempt)]
        rows = [checksum for checksums in found for checksum in checksums.rows()]
        return sorted(rows, key=lambda checksum: (checksum.buffer, checksum.start))

    def run(self, tokens: Sequence[int], start: int = 0, salt: str = "") -> PrefillDone:
        """Prefill from start to end, and check that exactly what was asked for arrived."""
        self.slots.wipe()
        length = len(tokens) - start
        extents = ((700, length // 2), (3, length - length // 2 + 5))
        done = self.done(attempt := self.ask(tokens, start, extents, salt))
        self.slots.check(tokens, start, extents)
        assert done.num_tokens == len(tokens)
        assert done.transferred_bytes == length * TOKEN_BYTES
        for buffer in range(3):
            covered = [range(c.start, c.stop) for c in self.checksums_of(attempt) if c.buffer == buffer]
            assert [position for each in covered for position in each] == list(range(start, len(tokens)))
        self.release(attempt)
        return done

    def close(self) -> None:
        self.hold.set()
        for each in reversed(self.all):
            assert each.worker.close(timeout=5)


LiveT = TypeVar("LiveT", bound=LiveWorld)


def live(world: LiveT) -> Iterator[LiveT]:
    """For fixtures: the world, and its end."""
    yield world
    world.close()
