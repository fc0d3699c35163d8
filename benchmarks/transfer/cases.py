"""What is swept: sizes, layouts, protocols; and what methods are compared by."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import product

from base.errors import StartupError


class Protocol(StrEnum):
    """What carries the bytes."""

    TCP = "tcp"
    RDMA = "rdma"
    SHM = "shm"


class Fragmentation(StrEnum):
    """How the tokens of a request lie in a pool: in one piece, in pages of which no two are neighbours, or in items."""

    CONTIGUOUS = "contiguous"
    PAGES = "pages"
    ITEMS = "items"


@dataclass(frozen=True)
class Case:
    """One point of the sweep.

    `page_size` counts tokens, on both sides; a source of scattered items is a source of pages of one token.
    `concurrency` requests of `tokens` tokens each are sent at once; a latency lasts from the first start to the last
    end.
    """

    tokens: int = 32768
    layers: int = 8
    item_bytes: int = 1152
    page_size: int = 64
    source: Fragmentation = Fragmentation.PAGES
    destination: Fragmentation = Fragmentation.CONTIGUOUS
    protocol: Protocol = Protocol.TCP
    concurrency: int = 1

    @property
    def num_bytes(self) -> int:
        """What is sent in all."""
        return self.concurrency * self.tokens * self.layers * self.item_bytes

    @property
    def pages_per_request(self) -> int:
        return -(-self.tokens // self.page_size)

    @property
    def rows(self) -> int:
        """Items per layer of either pool: twice what is sent, so that no two pieces need be neighbours."""
        return 2 * self.concurrency * self.pages_per_request * self.page_size

    def __str__(self) -> str:
        requests = f"{self.concurrency} x " if self.concurrency > 1 else ""
        return (
            f"{self.protocol} {requests}{short(self.tokens)} tokens x {self.layers} layers x {self.item_bytes} B, "
            f"pages of {self.page_size}, {self.source} to {self.destination}"
        )

    def check(self) -> None:
        """Raises StartupError for a size below one."""
        for name in ("tokens", "layers", "item_bytes", "page_size", "concurrency"):
            if getattr(self, name) < 1:
                raise StartupError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")


def short(tokens: int) -> str:
    """As people write it: 32K for 32768."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class Sweep:
    """The values asked for; what is empty stays at its default. Cases are their product."""

    tokens: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    item_bytes: tuple[int, ...] = ()
    page_size: tuple[int, ...] = ()
    source: tuple[Fragmentation, ...] = ()
    destination: tuple[Fragmentation, ...] = ()
    protocol: tuple[Protocol, ...] = ()
    concurrency: tuple[int, ...] = ()
    base: Case = field(default_factory=Case)

    def __iter__(self) -> Iterator[Case]:
        names = [f.name for f in fields(Case)]
        choices = [getattr(self, name) or (getattr(self.base, name),) for name in names]
        for values in product(*choices):
            yield replace(self.base, **dict(zip(names, values, strict=True)))

    @property
    def is_default(self) -> bool:
        return not any(getattr(self, f.name) for f in fields(Case))

    def cases(self, quick: bool) -> list[Case]:
        """The cases to run, checked. Without any wish, those that show what the project promises."""
        chosen = (QUICK if quick else DEFAULT) if self.is_default else tuple(self)
        for case in chosen:
            case.check()
        return list(dict.fromkeys(chosen))


_C, _P, _I = Fragmentation
_BASE = Case()
_SHM = replace(_BASE, protocol=Protocol.SHM)

DEFAULT: tuple[Case, ...] = (
    *(replace(_BASE, tokens=tokens) for tokens in (2048, 8192, 32768)),
    replace(_BASE, source=_C),
    replace(_BASE, source=_I),
    replace(_BASE, destination=_P),
    replace(_BASE, page_size=16),
    replace(_BASE, item_bytes=656),
    replace(_BASE, tokens=4096, layers=61),
    replace(_BASE, tokens=8192, concurrency=4),
    *(replace(_SHM, tokens=tokens) for tokens in (2048, 8192, 32768)),
    *(replace(_SHM, source=source, destination=to) for source, to in ((_P, _P), (_C, _I), (_I, _C), (_I, _I))),
)
"""The promised cases first of all: 32K tokens over TCP from any source and to pages, and over shared memory."""

QUICK: tuple[Case, ...] = (
    *(replace(_BASE, tokens=tokens) for tokens in (2048, 4096)),
    replace(_BASE, tokens=4096, destination=_P),
    replace(_SHM, tokens=8192, destination=_P),
    replace(_SHM, tokens=8192, source=_I, destination=_I),
)


class Group(StrEnum):
    """What a method stands for. Where several of a group were measured, the fastest speaks for it."""

    OURS = "ours"
    TOKEN = "token"
    PAGE = "page"
    LARGE = "large"
    NIXL = "nixl"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Group.OURS: "ours",
    Group.TOKEN: "one descriptor per token",
    Group.PAGE: "one descriptor per page",
    Group.LARGE: "descriptors of 1 MiB",
    Group.NIXL: "NIXL over UCX",
}
