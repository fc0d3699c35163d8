"""`python -m benchmarks.reading`: how fast another process's pool is read, beside writing the same bytes there.

Two processes of this machine, with the pools of a prefill and of a decode node. Reads and writes take turns, the same
descriptors in place in either direction: a sender that packs scattered items first (docs/benchmarks.md) writes faster
than this over TCP. What was read is compared, byte for byte.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from benchmarks.machine import this_machine
from benchmarks.program import run, uninterrupted
from benchmarks.transfer.ours import ReceivingPool, source_pool
from benchmarks.transfer.pools import buffers_of, fill
from control.messages import Destination
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s, plan_runs
from transfer.transports import Transports
from transfer.writer import Channel, Outcome, Pipeline, Write

_HOST = "127.0.0.1"
_WARM_UP = 1
Protocol = Literal["tcp", "shm"]


@dataclass(frozen=True)
class Shape:
    """Of both pools. rows: items of a layer, twice as many as there are tokens."""

    tokens: int
    layers: int
    item_bytes: int

    @property
    def rows(self) -> int:
        return 2 * self.tokens

    @property
    def num_bytes(self) -> int:
        return self.tokens * self.layers * self.item_bytes


@dataclass(frozen=True)
class Rates:
    """Medians over the rounds, in GB/s. descriptors: of one layer."""

    protocol: Protocol
    run: int
    descriptors: int
    read: float
    written: float


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 8192,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    item_bytes: Annotated[int, typer.Option(min=1, help="656: fp8, 1152: bfloat16.")] = 656,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
) -> None:
    """Time reads and writes over TCP and over shared memory."""
    console = Console()
    console.print(str(this_machine()))
    shape = Shape(tokens, layers, item_bytes)
    table = Table("protocol", "items together", "descriptors a layer", "read GB/s", "write GB/s", "read / write")
    for rates in measured(shape, rounds):
        numbers = f"{rates.read:.2f}", f"{rates.written:.2f}", f"{rates.read / rates.written:.2f}"
        table.add_row(rates.protocol, str(rates.run), str(rates.descriptors), *numbers)
    console.print(table)
    console.print(f"{shape.num_bytes / 1e6:.0f} MB in {layers} layers; medians of {rounds}")


def measured(shape: Shape, rounds: int) -> Iterator[Rates]:
    """For each protocol: everything in one piece, blocks of 64 items, and single items, at places drawn at random."""
    for protocol in ("tcp", "shm"):
        with_peer = multiprocessing.get_context("spawn")
        connection, child = with_peer.Pipe()
        process = with_peer.Process(target=serve, args=(child, protocol, shape), daemon=True)
        with uninterrupted():
            process.start()
        child.close()  # so that the end of the other process ends the wait for it
        try:
            bench = _Bench(protocol, shape, _offered(connection))
            for length in (shape.tokens, 64, 1):
                yield bench.rates(min(length, shape.tokens), rounds)
        finally:
            process.kill()
            process.join()


def _offered(connection: Connection) -> Destination:
    try:
        return Destination.model_validate_json(connection.recv())
    except EOFError:
        raise StartupError("the process that offers a pool ended; its reason is above") from None


def serve(connection: Connection, protocol: Protocol, shape: Shape) -> None:
    """The other process: offers a pool until it is killed."""
    pool = ReceivingPool(Transports(_HOST, protocol), shape.layers, shape.rows, shape.item_bytes)
    fill(pool.kv, seed=1)
    connection.send(pool.destination.model_dump_json())
    connection.poll(None)


class _Bench:
    def __init__(self, protocol: Protocol, shape: Shape, destination: Destination) -> None:
        self._protocol = protocol
        self._shape = shape
        self._there = destination.buffers
        transports = Transports(_HOST, protocol)
        self._kv = source_pool(shape.layers, shape.rows, shape.item_bytes)
        self._here = buffers_of(self._kv)
        transports.register(self._here)
        self._expected = torch.empty_like(self._kv)
        fill(self._expected, seed=1)
        self._reading = transports.connect(destination, reading=True)
        self._writing = transports.connect(destination)

    def rates(self, run: int, rounds: int) -> Rates:
        slots, rows = (_places(self._shape, run, seed) for seed in (1, 2))
        reads = list(_batches(slots, rows, self._there, self._here))
        writes = list(_batches(rows, slots, self._here, self._there))
        read, written = [], []
        for _ in range(_WARM_UP + rounds):
            self._kv.zero_()
            read.append(_seconds(lambda: _transfer(self._reading, reads)))
            assert torch.equal(self._kv[:, rows], self._expected[:, slots]), "other bytes were read than are there"
            written.append(_seconds(lambda: _transfer(self._writing, writes)))
        gigabytes = self._shape.num_bytes / 1e9
        rate = [gigabytes / statistics.median(seconds[_WARM_UP:]) for seconds in (read, written)]
        return Rates(self._protocol, run, len(reads[0].lengths), *rate)


def _batches(slots: Int64s, rows: Int64s, there: BufferInfo, here: BufferInfo) -> Iterator[Descriptors]:
    """From item `slots[i]` of each buffer there to item `rows[i]` of the same buffer here. slots, rows: int64 [n]."""
    runs = plan_runs(slots, rows)
    for item_bytes, source, destination in zip(there.item_lengths, there.ptrs, here.ptrs, strict=True):
        yield runs.descriptors(item_bytes).at(source, destination)


def _transfer(channel: Channel, batches: list[Descriptors]) -> None:
    pipeline = Pipeline(channel)
    write = Write(on_end=lambda: None, go_on=lambda: True)
    for batch in batches:
        pipeline.post(write, batch.cut(channel.max_bytes))
    pipeline.close(write)
    pipeline.drain()
    assert write.outcome is Outcome.LANDED, write.outcome


def _places(shape: Shape, run: int, seed: int) -> Int64s:
    """Rows of all tokens, so many together, each run at a place drawn at random: int64 [tokens]."""
    runs = -(-shape.tokens // run)
    starts = np.random.default_rng(seed).permutation(shape.rows // run)[:runs] * run
    return (starts[:, None] + np.arange(run)).ravel()[: shape.tokens]


def _seconds(act: Callable[[], None]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


if __name__ == "__main__":
    run(main)
