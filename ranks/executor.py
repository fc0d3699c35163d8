"""Has the workers of all ranks of a node do what rank 0 orders, and collects what they report.

Rank 0's worker is in the process of the caller. The others get their orders over lines, in small loops of their own.
A node of one process is a group without others: nothing above knows how many ranks there are, but by `world_size`.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgpack
import structlog
from pydantic import TypeAdapter

from ranks.group import Ranks
from ranks.sealed_socket import FrameRefused, SealedSocket

log = structlog.get_logger(__name__)

OrderT = TypeVar("OrderT")
OrderT_contra = TypeVar("OrderT_contra", contravariant=True)
ReportT = TypeVar("ReportT")
KindT = TypeVar("KindT")
SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


@dataclass(frozen=True)
class LineCodec(Generic[SentT, ReceivedT]):
    """How one end writes what it sends, and reads what it receives. decode: raises ValueError for other bytes."""

    encode: Callable[[SentT], bytes]
    decode: Callable[[bytes], ReceivedT]


class DataclassCodec(Generic[KindT]):
    """Values of some dataclasses as bytes: msgpack of the name of their class and their fields."""

    def __init__(self, kinds: tuple[type[KindT], ...]) -> None:
        self._kinds = {kind.__name__: TypeAdapter(kind) for kind in kinds}

    def encode(self, value: KindT) -> bytes:
        kind = type(value).__name__
        return bytes(msgpack.packb((kind, self._kinds[kind].dump_python(value))))

    def decode(self, data: bytes) -> KindT:
        """Raises ValueError if these are not the bytes of such a value, with fields of its types."""
        try:
            found: Any = msgpack.unpackb(data, use_list=False)
        except (TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"not msgpack: {error}") from error
        match found:
            case (str(kind), dict(fields)) if kind in self._kinds:
                return self._kinds[kind].validate_python(fields)
        raise ValueError(f"expected one of {', '.join(self._kinds)}, and its fields")


class RankLine(Generic[SentT, ReceivedT]):
    """One end of what rank 0 and another rank tell each other in addition to collectives: values, in order.

    Sending never waits: the other rank may be stopped. Values arrive as long as both ranks live. rank: the other
    one. receive: called with each value, in order, on a thread of the line. failed: called with the reason, on a thread
    of the line, if something else came, or a value cannot be sent; the line is closed then.
    """

    def __init__(
        self,
        connection: SealedSocket,
        rank: int,
        codec: LineCodec[SentT, ReceivedT],
        receive: Callable[[ReceivedT], None],
        failed: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._rank = rank
        self._codec = codec
        self._receive = receive
        self._failed = failed
        self._outbox: queue.SimpleQueue[SentT] = queue.SimpleQueue()
        for work in (self._write, self._read):
            threading.Thread(target=work, name="rank-line", daemon=True).start()

    def send(self, item: SentT) -> None:
        """Any thread may call it. The value must not change any more."""
        self._outbox.put(item)

    def _write(self) -> None:
        try:
            while True:
                self._connection.send(self._codec.encode(self._outbox.get()))
        except OSError:
            return  # The other rank has ended, which the rank's watch says.
        except Exception as error:
            log.exception("a value for another rank cannot be sent")
            self._fail(f"cannot send: {error}")

    def _read(self) -> None:
        while True:
            try:
                value = self._codec.decode(self._connection.receive())
            except (EOFError, OSError):
                return
            except (FrameRefused, ValueError) as error:
                self._fail(str(error))
                return
            self._receive(value)

    def _fail(self, reason: str) -> None:
        self._connection.shut_down()
        self._failed(f"the line to rank {self._rank} failed: {reason}")


class Worker(Protocol[OrderT_contra]):
    """Does what it is ordered, on threads of its own."""

    def take(self, order: OrderT_contra) -> None:
        """Begin with an order. Never waits."""

    def close(self, timeout: float) -> bool:
        """End once what was ordered has ended. Whether it has within `timeout` seconds."""


class Executor(Generic[OrderT, ReportT]):
    """The workers of all ranks, for the loop of rank 0."""

    def __init__(
        self,
        ranks: Ranks,
        new_worker: Callable[[Callable[[ReportT], None]], Worker[OrderT]],
        codec: LineCodec[OrderT, ReportT],
        wake: Callable[[], None],
    ) -> None:
        """new_worker: makes that of rank 0, and is told where it reports to. codec: for lines to the other workers.
        wake: called, on any thread, when there is a report."""
        self._ranks = ranks
        self._wake = wake
        self._reports: queue.SimpleQueue[tuple[int, ReportT]] = queue.SimpleQueue()
        self._worker = new_worker(partial(self.report, 0))
        self._lines = [
            RankLine(connection, rank, codec, partial(self.report, rank), ranks.fail)
            for rank, connection in sorted(ranks.lines.items())
        ]

    @property
    def world_size(self) -> int:
        return 1 + len(self._lines)

    def order(self, rank: int, order: OrderT) -> None:
        """Have one rank do something."""
        if rank:
            self._lines[rank - 1].send(order)
        else:
            self._worker.take(order)

    def order_all(self, order: OrderT) -> None:
        for rank in reversed(range(self.world_size)):
            self.order(rank, order)

    def report(self, rank: int, report: ReportT) -> None:
        """A rank's worker has reported. Any thread may call it."""
        self._reports.put((rank, report))
        self._wake()

    def check(self) -> None:
        """Raises GroupFailed if a rank has ended."""
        self._ranks.check()

    def poll(self) -> Iterator[tuple[int, ReportT]]:
        """What ranks have reported, each with its rank; what is not taken stays."""
        while not self._reports.empty():
            yield self._reports.get()

    def step_failed(self, error: str) -> None:
        """Rank 0 could not do its part of a step. Raises GroupFailed if other ranks wait for it."""
        if self._lines:
            raise self._ranks.failure(RuntimeError(error))

    def leave(self, order: OrderT) -> None:
        """End the node in peace: give the last order, and wait a while for the other ranks."""
        self.order_all(order)
        self._ranks.leave()

    def close(self, timeout: float) -> bool:
        """End rank 0's worker. Whether all of its orders have ended within `timeout` seconds."""
        return self._worker.close(timeout)
