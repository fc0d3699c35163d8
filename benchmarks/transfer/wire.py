"""What initiator and target say to each other: msgpack maps over one stream, whose end ends the target.

A stream rather than ZeroMQ, since the operating system closes it when a process ends, however it ends.
"""

import socket
import struct
from typing import ClassVar, Literal, TypeVar

import msgpack
from pydantic import ValidationError

from base.errors import StartupError
from base.wire import UInt, WireModel
from control.messages import Destination, Peer

_HEADER = struct.Struct("!I")
_MAX_BYTES = 1 << 28
_CONNECT_S = 10.0

Answer = TypeVar("Answer", bound="Saying")


class Saying(WireModel):
    """Base of all kinds; the class name is the kind on the wire."""

    kinds: ClassVar[dict[str, type["Saying"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        Saying.kinds[cls.__name__] = cls


class Hello(Saying):
    """Initiator to target, first of all. Answered by Welcome."""

    version: str


class Welcome(Saying):
    """machine: the fields of `benchmarks.machine.Machine`."""

    version: str
    machine: dict[str, object]
    has_nixl: bool


class Prepare(Saying):
    """Have a host pool of this shape, reachable by this protocol and no other. Answered by Prepared."""

    protocol: Literal["tcp", "rdma", "shm"]
    layers: UInt
    rows: UInt
    item_bytes: UInt


class Prepared(Saying):
    destination: Destination


class Wipe(Saying):
    """Zero the pool, so that nothing that an earlier method wrote can pass for this one's. Answered by Done."""


class Done(Saying):
    pass


class Digest(Saying):
    """slots: int64, little endian. Answered by Digests: xxh3 of those slots' bytes, in that order, layer by layer."""

    slots: bytes


class Digests(Saying):
    layers: tuple[int, ...]


class OpenNixl(Saying):
    """Register the pool with a NIXL agent over these UCX transports, until CloseNixl. Answered by NixlOpened."""

    ucx_tls: str


class NixlOpened(Saying):
    metadata: bytes


class CloseNixl(Saying):
    """Answered by Done."""


class OpenDecode(Saying):
    """Have a decode node's tiers for one prompt of `tokens` tokens, which `prefill` is to be asked for, until
    CloseDecode. Answered by Done."""

    protocol: Literal["tcp", "rdma", "shm"]
    prefill: Peer
    tokens: UInt


class AdmitOne(Saying):
    """Have one prompt prefilled and admitted. Answered by PromptAdmitted."""


class PromptAdmitted(Saying):
    """The fields of `benchmarks.transfer.overlap_decode.Admission`."""

    ready_at: float
    admission_seconds: float
    transfer_seconds: float
    num_bytes: UInt
    checksums: UInt


class CloseDecode(Saying):
    """Answered by Done."""


class Failed(Saying):
    """Target to initiator, in place of any answer: why it cannot."""

    reason: str


class Disconnected(Exception):
    """The other side has gone."""


class Link:
    """One side of the stream. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(None)

    @property
    def local_host(self) -> str:
        """The address of this machine that the other side reached or was reached from."""
        return str(self._connection.getsockname()[0]) if self._connection.family == socket.AF_INET else "127.0.0.1"

    def ask(self, saying: Saying, answer: type[Answer]) -> Answer:
        """Send and wait for the answer. Raises StartupError with the target's reason if it cannot, or has gone."""
        try:
            self.send(saying)
            received = self.receive()
        except (Disconnected, OSError) as error:
            raise StartupError(f"the target ended while it was asked to {type(saying).__name__}: {error}") from error
        if isinstance(received, Failed):
            raise StartupError(f"the target cannot {type(saying).__name__}: {received.reason}")
        if not isinstance(received, answer):
            raise StartupError(f"the target answered {type(received).__name__}, not {answer.__name__}")
        return received

    def send(self, saying: Saying) -> None:
        data = msgpack.packb({"kind": type(saying).__name__, "body": saying.model_dump()})
        self._connection.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Saying:
        """Raises Disconnected at the end of the stream, and for anything that is no saying."""
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > _MAX_BYTES:
            raise Disconnected(f"a message of {length} bytes")
        try:
            frame = msgpack.unpackb(self._exactly(length), use_list=False)
            return Saying.kinds[frame["kind"]].model_validate(frame["body"])
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            raise Disconnected(f"a malformed message: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            if not (count := self._connection.recv_into(view)):
                raise Disconnected("the connection was closed")
            view = view[count:]
        return bytes(data)


def connect(address: str) -> Link:
    """Reach a target at HOST:PORT. Raises StartupError if there is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise StartupError(f"--target {address}: expected HOST:PORT, as the target printed it")
    try:
        return Link(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
    except (OSError, OverflowError) as error:
        raise StartupError(
            f"no target at {address} ({error}); start one there with `hisparse-pd bench transfer --role target`"
        ) from error
