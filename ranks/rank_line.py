"""What rank 0 and another rank tell each other in addition to collectives: values, in order.

On one host a line is a pair of sockets that the ranks inherit; between hosts, a connection of which both ends have
shown that they know the group's key (`ranks/handshake.py`). What comes is data of the kinds that the codec knows.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgpack
import structlog
from pydantic import TypeAdapter

from ranks.place import NO_LINE, RankPlace
from ranks.sealed_socket import INHERITED, FrameRefused, SealedSocket

log = structlog.get_logger(__name__)

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
        packed: bytes = msgpack.packb((kind, self._kinds[kind].dump_python(value)))
        return packed

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
    """One end. Sending never waits: the other rank may be stopped. What was sent comes as long as both ranks live.

    receive: called with each value, in order, on a thread of the line. failed: called with the reason, on a thread of
    the line, if something else came, or a value cannot be sent; the line is closed then.
    """

    def __init__(
        self,
        connection: SealedSocket,
        codec: LineCodec[SentT, ReceivedT],
        receive: Callable[[ReceivedT], None],
        failed: Callable[[str], None],
    ) -> None:
        self._connection = connection
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
        self._failed(reason)


def inherited_lines(place: RankPlace) -> dict[int, SealedSocket]:
    """This rank's ends of its lines within its host, by the other rank."""
    if place.rank == 0:
        ends = {rank: first for rank, (first, _) in enumerate(place.lines, start=1)}
    else:
        ends = {0: place.lines[place.rank - 1][1]} if place.lines else {}
    missing = NO_LINE[0]
    return {rank: SealedSocket(socket.socket(fileno=end), INHERITED) for rank, end in ends.items() if end != missing}


def lines_to_others(
    lines: Mapping[int, SealedSocket],
    codec: LineCodec[SentT, ReceivedT],
    receive: Callable[[int, ReceivedT], None],
    failed: Callable[[str], None],
) -> list[RankLine[SentT, ReceivedT]]:
    """Rank 0's lines, in the order of the other ranks. receive, failed: as of RankLine; they are told the rank, too."""

    def line(rank: int) -> RankLine[SentT, ReceivedT]:
        return RankLine(
            lines[rank],
            codec,
            lambda item: receive(rank, item),
            lambda reason: failed(f"the line to rank {rank} failed: {reason}"),
        )

    return [line(rank) for rank in sorted(lines)]


def line_to_first(
    lines: Mapping[int, SealedSocket],
    codec: LineCodec[SentT, ReceivedT],
    receive: Callable[[ReceivedT], None],
    failed: Callable[[str], None],
) -> RankLine[SentT, ReceivedT]:
    """The line of a rank other than 0."""
    return RankLine(lines[0], codec, receive, lambda reason: failed(f"the line to rank 0 failed: {reason}"))
