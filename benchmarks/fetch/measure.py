"""Times what computing a prefix takes and what fetching it takes, and asks the node's own estimates which is faster.

Also when a pass behind a fetched prefix is over, if it begins after the fetch and if it begins as soon as a node would.
"""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fetch.lender import Lender
from benchmarks.fetch.link import throttled
from control.messages import AttemptId, Destination, Peer
from engine.chunked import ChunkedPrefill, PrefillJob
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.loader import choose_backend, load_model, read_spec
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from model.tiny import write_tiny_checkpoint
from prefill_node.arrival import AwaitedPrefixes, PrefixArrival, arrives_in_time
from prefill_node.costs import ComputeCost, FetchCosts
from prefill_node.fetch import Fetch, RunningFetch
from prefill_node.orders import BlockToRead, LayersRead
from prefill_node.pool_io import HostSink
from service.checkpoint import identity_of
from transfer.choices import TransferProtocol, Transport
from transfer.planner import Int64s
from transfer.transports import Transports
from transfer.writer import Pipeline

PAGE_SIZE = 64
_CPU = torch.device("cpu")
_DECODE = Peer(role="decode", address="127.0.0.1:1", boot_id="lender")
_LOOK_S = 0.01
_PATIENCE_S = 3600.0
_CUT_AT = 1.5
"""Of the time that computing takes: which is faster is known by then."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over positions [start, stop) of a prompt."""

    start: int
    stop: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A prefix of so many tokens over one link. rate: bytes a second, 0 for no limit.

    fetching: seconds, or None if it was cut. after, meanwhile: seconds from the request to the end of a pass over the
    next chunk, which begins when all of the prefix is there, or while layers of it come; None if it was cut.
    estimated_*, fetches: what the node would have thought and done before.
    """

    transport: str
    rate: float
    tokens: int
    computing: float
    fetching: float | None
    after: float | None
    meanwhile: float | None
    estimated_computing: float
    estimated_fetching: float

    @property
    def fetches(self) -> bool:
        return self.estimated_fetching < self.estimated_computing

    @property
    def is_right(self) -> bool:
        """Whether the node's choice is the faster way."""
        return self.fetches == (self.fetching is not None and self.fetching < self.computing)


@contextmanager
def tiny_model(layers: int, context: int) -> Iterator[SparseModel]:
    """A random model of the DeepSeek family, in float32."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tiny"
        write_tiny_checkpoint(
            path, "deepseek_v32", seed=1, layers=layers, index_n_heads=16, max_position_embeddings=context
        )
        spec = read_spec(path, torch.float32, context, "auto", "auto")
        yield load_model(path, torch.float32, _CPU, context, choose_backend("auto", _CPU, spec), "auto")


class Node:
    """A prefill node's model and pool."""

    def __init__(self, model: SparseModel, tokens: int, chunk_size: int) -> None:
        self.model = model
        self.chunk_size = chunk_size
        self.pool = PagedKVPool(model.spec.kv_layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, _CPU)
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(0, model.spec.vocab_size, (tokens + 1,), generator=generator)

    def compute(self, tokens: int, said: Callable[[Pass], None]) -> list[Pass]:
        """Compute a random prompt, chunk by chunk."""
        prefill: ChunkedPrefill[PrefillJob] = ChunkedPrefill(self.pool, self.chunk_size)
        prefill.add(job := PrefillJob(self._prompt[: tokens + 1]))
        prefill.start_waiting()
        passes = []
        while (step := prefill.plan()) is not None:
            [(_, chunk)] = step.chunks
            started = time.perf_counter()
            step.compute(self.model)
            passes.append(Pass(chunk.start, chunk.stop, time.perf_counter() - started))
            prefill.complete(step)
            said(passes[-1])
        prefill.release(job)
        return passes

    def compute_behind(self, tokens: int, pages: Int64s, on_layer: Callable[[int], None]) -> None:
        """One pass over the chunk behind so many tokens, whose KV is in these pages or comes there."""
        stop = tokens + self.chunk_size
        chunk = PrefillChunk.of(self._prompt[: stop + 1], tokens, stop, PagedSequence(self.pool, pages))
        self.model.prefill([chunk], on_layer)


class Links:
    """Fetches into a node's pool over links of different rates, by one transport."""

    def __init__(self, node: Node, protocol: TransferProtocol, tokens: int) -> None:
        self._node = node
        self.protocol = protocol
        self._transports = Transports("127.0.0.1", protocol)
        self._transports.register(node.pool.get_contiguous_buf_infos())
        self._lender = Lender(node.pool.layout, tokens, protocol, identity_of(node.model.spec))
        # What is imported and compiled for a transport, as a node does when it starts.
        self.fetch(node.chunk_size, 0.0, _PATIENCE_S)

    @property
    def _destination(self) -> Destination:
        return self._lender.destination

    def fetch(self, tokens: int, rate: float, patience: float) -> float | None:
        """Seconds from the request to verified bytes; None if it took longer than `patience`."""
        pool = self._node.pool
        pages = pool.allocate(tokens)
        assert pages is not None
        started = time.perf_counter()
        is_whole = self._read(tokens, rate, pages, PrefixArrival(pool.layout.layer_of_buffer), patience)
        seconds = time.perf_counter() - started
        pool.free(pages)
        return seconds if is_whole else None

    def prefill(self, tokens: int, rate: float, pass_seconds: float) -> float:
        """Seconds from the request to the end of the pass behind the prefix.

        pass_seconds: what it is expected to take; the pass begins as soon as layers come faster. 0 to have it begin
        after the fetch.
        """
        pool = self._node.pool
        pages = pool.allocate(tokens + self._node.chunk_size)
        assert pages is not None
        came = threading.Event()
        layers: list[LayersRead] = []

        def on_layers(read: LayersRead) -> None:
            layers.append(read)
            came.set()

        arrival = PrefixArrival(pool.layout.layer_of_buffer, report=on_layers)
        started = time.perf_counter()

        def fetch() -> None:
            self._read(tokens, rate, pages, arrival, _PATIENCE_S)
            arrival.end()
            came.set()

        thread = threading.Thread(target=fetch)
        thread.start()
        while thread.is_alive() and not (
            layers and arrives_in_time(layers[-1], arrival.num_layers, pass_seconds, time.monotonic())
        ):
            came.wait(_LOOK_S)
            came.clear()
        awaited = AwaitedPrefixes({0: arrival}, num_chunks=1, patience=_PATIENCE_S)
        self._node.compute_behind(tokens, pages, awaited.wait)
        seconds = time.perf_counter() - started
        thread.join()
        pool.free(pages)
        return seconds

    def _read(self, tokens: int, rate: float, pages: Int64s, arrival: PrefixArrival, patience: float) -> bool:
        """Ask and read. Whether all of it came in time."""
        pool = self._node.pool
        pipeline = Pipeline(throttled(self._transports.connect(self._destination, reading=True), rate))
        started = time.perf_counter()
        slots, checksums = self._lender.lend(tokens)
        attempt = AttemptId("lender", "r", 1)
        read = BlockToRead(1, attempt, _DECODE, self._destination, 0, tokens, pages, slots, checksums, 0, False)
        fetch = Fetch(read, lambda report: None, arrival)
        running = RunningFetch(fetch, pipeline, HostSink([*pool.kv, *pool.index_keys]), PAGE_SIZE)
        report = running.run(may_post=lambda: time.perf_counter() - started < patience)
        seconds = time.perf_counter() - started
        pipeline.channel.close()
        if report.error is not None and seconds < patience:
            raise RuntimeError(f"a fetch of {tokens} tokens failed: {report.error}")
        return report.error is None

    def close(self) -> None:
        self._lender.__exit__()
        self._transports.unregister(self._node.pool.get_contiguous_buf_infos())


def run_link(
    links: Links,
    node: Node,
    passes: Sequence[Pass],
    lengths: Sequence[int],
    rate: float,
    said: Callable[[Case], None],
) -> list[Case]:
    """Fetch each length over one link, in random order, each time after asking what the node would do.

    The node has computed `passes` before and knows nothing of the link. As a node does, it learns from what it chooses
    only: from the fetch, or from computing, of which it knows already.
    """
    compute, fetch = ComputeCost(node.chunk_size), FetchCosts()
    for each in passes:
        compute.observe([(each.start, each.stop)], each.seconds)
    transport: Transport = "shm" if links.protocol == "shm" else "tcp"
    cases = []
    for tokens in random.Random(1).sample(list(lengths), len(lengths)):
        computing = sum(each.seconds for each in passes if each.stop <= tokens)
        num_bytes = tokens * node.pool.layout.token_bytes
        estimated = compute.saved(0, tokens, tokens + PAGE_SIZE)
        assert estimated is not None
        expected = fetch.estimate(_DECODE.boot_id, transport, num_bytes)
        taken = links.fetch(tokens, rate, patience=_CUT_AT * computing)
        after = meanwhile = None
        if taken is not None:
            pass_seconds = compute.of_pass(tokens, tokens + node.chunk_size)
            assert pass_seconds is not None
            after, meanwhile = (links.prefill(tokens, rate, seconds) for seconds in (0.0, pass_seconds))
        case = Case(links.protocol, rate, tokens, computing, taken, after, meanwhile, estimated, expected)
        if case.fetches:
            # One that takes longer than computing is given up by then, and tells what had come.
            if taken is None:
                num_bytes, taken_by_then = round(rate * estimated), estimated
            else:
                taken_by_then = min(taken, estimated)
                num_bytes = round(num_bytes * taken_by_then / taken)
            fetch.observe(_DECODE.boot_id, transport, num_bytes, taken_by_then)
        cases.append(case)
        said(case)
    return cases
