"""Memory that other processes write to or read, how to reach it, and checksums of its content."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from base.wire import Identifier, UInt, WireModel
from transfer.choices import EngineTransport, Transport

ADDRESS_LIMIT = 2**63
"""Address arithmetic uses signed integers of 64 bits."""


class BufferInfo(WireModel):
    """Buffers, one per layer and then one per index layer: base address, length in bytes, bytes per item."""

    ptrs: tuple[UInt, ...]
    lengths: tuple[UInt, ...]
    item_lengths: tuple[UInt, ...]

    @model_validator(mode="after")
    def _same_count(self) -> Self:
        if not len(self.ptrs) == len(self.lengths) == len(self.item_lengths):
            raise ValueError("ptrs, lengths and item_lengths differ in length")
        if any(item == 0 or length % item for item, length in zip(self.item_lengths, self.lengths, strict=True)):
            raise ValueError("every length must be a multiple of its item length")
        if any(ptr + length >= ADDRESS_LIMIT for ptr, length in zip(self.ptrs, self.lengths, strict=True)):
            raise ValueError("a buffer ends outside the address space")
        return self

    @property
    def num_items(self) -> int:
        return min((n // item for n, item in zip(self.lengths, self.item_lengths, strict=True)), default=0)


class Session(WireModel):
    """A Mooncake engine that takes writes. name: its HOST:PORT for other engines."""

    transport: EngineTransport
    name: Identifier


class SharedMemory(WireModel):
    """A memfd that processes of the same host may map: descriptor `fd` of process `pid`.

    name: random and unique. base: the owner's address of its first byte. length: in bytes.
    """

    transport: ClassVar[Transport] = "shm"

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    fd: Annotated[int, Field(ge=0, lt=2**31)]
    name: Identifier
    base: UInt
    length: Annotated[int, Field(ge=1, lt=2**63)]

    @model_validator(mode="after")
    def _is_addressable(self) -> Self:
        if self.base + self.length >= ADDRESS_LIMIT:
            raise ValueError("the shared memory ends outside the address space")
        return self


class RemotePool(WireModel):
    """Buffers of another process, and how to reach them. `shared` contains them all."""

    buffers: BufferInfo
    sessions: tuple[Session, ...] = ()
    shared: SharedMemory | None = None

    @model_validator(mode="after")
    def _buffers_are_shared(self) -> Self:
        if self.shared is not None:
            start, stop = self.shared.base, self.shared.base + self.shared.length
            for ptr, length in zip(self.buffers.ptrs, self.buffers.lengths, strict=True):
                if not start <= ptr <= ptr + length <= stop:
                    raise ValueError("a buffer is outside the shared memory")
        return self

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(way.transport for way in (self.shared, *self.sessions) if way is not None)


class Checksum(NamedTuple):
    """xxh3, 64 bits, of the items of positions [start, stop) in buffer number `buffer`, in the order of positions."""

    buffer: int
    start: int
    stop: int
    digest: int


class Checksums(WireModel):
    """Checksums as columns: parsing thousands of objects would take longer than verifying them."""

    buffers: tuple[UInt, ...] = ()
    starts: tuple[UInt, ...] = ()
    stops: tuple[UInt, ...] = ()
    digests: tuple[Annotated[int, Field(ge=0, lt=2**64)], ...] = ()

    @classmethod
    def of(cls, checksums: Sequence[Checksum]) -> Self:
        if not checksums:
            return cls()
        buffers, starts, stops, digests = zip(*checksums, strict=True)
        return cls(buffers=buffers, starts=starts, stops=stops, digests=digests)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.buffers) == len(self.starts) == len(self.stops) == len(self.digests):
            raise ValueError("the columns differ in length")
        return self

    def __len__(self) -> int:
        return len(self.buffers)

    def rows(self) -> Iterator[Checksum]:
        return map(Checksum, self.buffers, self.starts, self.stops, self.digests)
