"""A prefill engine that computes and sends for real, with a model of which every byte is known."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from base.metrics import Metrics
from control.messages import (
    AttemptId,
    ChunkDone,
    Destination,
    FetchDone,
    FetchRequest,
    Peer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
)
from engine.chunked import ChunkedPrefill
from kvcache.page_cache import PageCache, can_cache
from kvcache.paged_pool import PagedKVPool
from model.passes import PrefillChunk
from prefill_node.choices import FetchPolicy
from prefill_node.engine import PrefillUpdate
from prefill_node.fetcher import FetchResources
from prefill_node.job import TransferJob
from prefill_node.landing import HostSink
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.offer import Offer
from prefill_node.ring import SendRings
from prefill_node.sender import SendResources
from prefill_node.source import HostSource, Reading
from tests.identity import IDENTITY
from tests.prefill_node.endpoint_harness import TCP
from tests.prefill_node.fakes import LAYOUT, ME
from tests.prefill_node.sending import CPU, LateChannel
from transfer.choices import ChecksumMode
from transfer.memory import BufferInfo, Checksum

NUM_SLOTS = 1024
VOCAB = 100
UNTOUCHED = 255
TOKEN_BYTES = 2 * LAYOUT.item_bytes + LAYOUT.index_key_bytes
"""Of a token in all buffers: two layers, of which one has index keys."""


def new_cache(num_pages: int = 16, page_size: int = 16) -> PageCache:
    """A cache, which is off where pages are no parts of blocks."""
    return PageCache(PagedKVPool(LAYOUT, num_pages, page_size, CPU), can_cache(page_size))


def states_of(tokens: Sequence[int]) -> list[int]:
    """What RunningModel writes for each position, before the layer's number is added."""
    states, state = [], 0
    for token in tokens:
        state = (state * 31 + token + 1) % 200
        states.append(state)
    return states


UpdateT = TypeVar("UpdateT", ChunkDone, PrefillDone, PrefillFailed, Quiesced, FetchRequest, FetchDone)


class RunningModel:
    """Each position's KV depends on all tokens up to it, by way of the KV of the position before it.

    computed: positions of each forward pass, by the sum of which a test knows what was computed.
    """

    def __init__(self) -> None:
        self.computed: list[list[tuple[int, int]]] = []
        self.error: Exception | None = None
        self.before_pass: Callable[[], None] = lambda: None

    @property
    def tokens(self) -> int:
        return sum(stop - start for chunks in self.computed for start, stop in chunks)

    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None]) -> None:
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
    """A decode node's pool: `take` gives a request slots that no other had, in scattered extents."""

    def __init__(self) -> None:
        self.layers = [torch.full((NUM_SLOTS, length), UNTOUCHED, dtype=torch.uint8) for length in (16, 16, 8)]

    @property
    def destination(self) -> Destination:
        buffers = BufferInfo(
            ptrs=tuple(layer.data_ptr() for layer in self.layers),
            lengths=tuple(layer.nbytes for layer in self.layers),
            item_lengths=(16, 16, 8),
        )
        return Destination(identity=IDENTITY, buffers=buffers, sessions=TCP)

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


class PrefillHarness:
    """A whole prefill engine between a fake model and a channel that copies."""

    def __init__(
        self,
        cache: PageCache,
        chunk_size: int = 32,
        checksums: ChecksumMode = "full",
        fetch_policy: FetchPolicy = "never",
    ) -> None:
        self.model = RunningModel()
        self.cache = cache
        self.pool = pool = cache.pool
        self.slots = Slots()
        self.metrics = Metrics()
        self.channel = LateChannel("tcp")
        self.reads = LateChannel("tcp")
        self.silence = 0.0
        self.prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(self.model, pool, chunk_size, cache)  # type: ignore[arg-type]
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        source = HostSource([*pool.kv, *pool.index_keys])
        self.engine = self.new_engine(
            EngineParts(
                prefill=self.prefill,
                device=CPU,
                resources=SendResources(
                    reading=Reading(source, LAYOUT.layer_of_buffer, pool.page_size, checksums),
                    rings=SendRings(pin=False, register=lambda _: None),
                    connect=lambda _: self.channel,
                    silence=lambda _: 0.0,
                ),
                fetching=FetchResources(
                    connect=lambda _: self.connect_reads(),
                    silence=lambda _: self.silence,
                    new_sink=lambda: HostSink([*pool.kv, *pool.index_keys]),
                    page_size=pool.page_size,
                ),
                offer=Offer(IDENTITY, ("tcp",), max_tokens=512, vocab_size=VOCAB),
                metrics=self.metrics,
                wake=lambda: self._woken.put(None),
                transfer_timeout=30.0,
                fetch_policy=fetch_policy,
            )
        )
        self.hold = threading.Event()
        """For a test that holds the model or the channel."""
        self.updates: list[PrefillUpdate] = []
        self._requests = 0

    def new_engine(self, parts: EngineParts) -> ModelEngine:
        return ModelEngine(parts)

    def connect_reads(self) -> LateChannel:
        return self.reads

    def ask(
        self,
        tokens: Sequence[int],
        start: int = 0,
        extents: tuple[tuple[int, int], ...] | None = None,
        salt: str = "",
        decode: Peer = ME,
    ) -> AttemptId:
        """Start a prefill."""
        self._requests += 1
        attempt = AttemptId(decode.boot_id, f"r{self._requests}", 1)
        request = PrefillRequest(
            attempt=attempt,
            token_ids=tuple(tokens),
            start=start,
            destination=self.slots.destination,
            extents=extents or ((0, len(tokens) - start),),
            hisparse=True,
            cache_salt=salt,
        )
        assert self.engine.refusal(decode, request) is None
        self.engine.start(decode, request)
        return attempt

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Turn the engine's loop."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"there were {self.updates}"
            with suppress(queue.Empty):
                self._woken.get(timeout=0.01)
            self.updates += self.engine.poll()

    def until(self, kind: type[UpdateT], attempt: AttemptId) -> UpdateT:
        """Turn the loop until the engine says this of an attempt."""

        def said() -> list[UpdateT]:
            return [each for each in self.updates if isinstance(each, kind) and each.attempt == attempt]

        self.turn_until(lambda: bool(said()))
        return said()[-1]

    def until_computed(self, attempt: AttemptId, tokens: int) -> None:
        self.turn_until(lambda: self.engine.progress((attempt,)).computed[0][1] >= tokens)

    def done(self, attempt: AttemptId) -> PrefillDone:
        return self.until(PrefillDone, attempt)

    def checksums_of(self, attempt: AttemptId) -> list[Checksum]:
        """All that the decode node was told of an attempt, in order of positions."""
        told = [
            checksum
            for update in self.updates
            if isinstance(update, (ChunkDone, PrefillDone)) and update.attempt == attempt
            for checksum in update.checksums.rows()
        ]
        return sorted(told, key=lambda checksum: (checksum.buffer, checksum.start))

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
        assert self.engine.release(attempt)
        return done

    def metric(self, name: str, **labels: str) -> float:
        self.engine.refresh_metrics()
        value = self.metrics.registry.get_sample_value(f"hisparse_pd_{name}", labels)
        assert value is not None
        return value

    def close(self) -> None:
        self.engine.close(timeout=5)
        assert not self.engine._compute._thread.is_alive()  # type: ignore[attr-defined]
