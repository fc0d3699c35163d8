"""Copies of scattered pieces of memory within this process, as loops that are compiled at the first import (seconds).

NumPy's gathers and scatters of rows reach a quarter of this speed. Small pieces are as fast as large ones for two
reasons: each is prefetched some pieces ahead, and non-temporal stores do not first read the line that they overwrite.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import llvmlite.ir
import numba
import numpy as np
from llvmlite.ir import Constant, FunctionType, IntType, VectorType, VoidType
from numba.core import cgutils, types
from numba.extending import intrinsic

from transfer.planner import Descriptors

_AHEAD = 4
"""Distance in pieces from the copied piece to the prefetched one."""
_PREFETCHED_BYTES = 2048
"""Per piece. The processor prefetches the rest by itself."""
_SHARES = 32
"""Per batch: few atomic additions, and threads that end at about the same time."""
_LINE = 64
_VECTOR = 32
"""Bytes, and alignment of the destination, of a vector store."""


def _pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, llvmlite.ir.PointerType(to))


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(context: Any, destination: Any, source: Any, length: Any) -> Any:
    """Emit a call of the C library's memcpy with addresses given as integers."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> None:
        to, source, length = arguments
        byte = IntType(8)
        cgutils.raw_memcpy(builder, _pointer(builder, to, byte), _pointer(builder, source, byte), length, 1)

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(context: Any, address: Any) -> Any:
    """Emit a prefetch of the line at an address into the second-level cache."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> None:
        pointer, word = llvmlite.ir.PointerType(IntType(8)), IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], FunctionType(VoidType(), [pointer, word, word, word])
        )
        read, second_level, data = word(0), word(2), word(1)
        builder.call(prefetch, [_pointer(builder, arguments[0], IntType(8)), read, second_level, data])

    return types.void(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(context: Any, destination: Any, source: Any) -> Any:
    """Emit a copy of 64 bytes by non-temporal vector stores. The destination is a multiple of 32."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> None:
        to, source = arguments
        vector = VectorType(IntType(64), _VECTOR // 8)
        for offset in range(0, _LINE, _VECTOR):
            step = IntType(64)(offset)
            loaded = builder.load(_pointer(builder, builder.add(source, step), vector), align=1)
            store = builder.store(loaded, _pointer(builder, builder.add(to, step), vector), align=_VECTOR)
            store.set_metadata("nontemporal", builder.module.add_metadata([Constant(IntType(32), 1)]))

    return types.void(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _fence(context: Any) -> Any:
    """Emit a full fence, which alone orders non-temporal stores."""

    def emit(_: Any, builder: Any, __: Any, ___: Any) -> None:
        builder.fence("seq_cst")

    return types.void(), emit


@intrinsic  # type: ignore[untyped-decorator]
def _fetch_and_add(context: Any, address: Any, number: Any) -> Any:
    """Emit an atomic addition to the integer at an address, which returns the old value."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        address, number = arguments
        return builder.atomic_rmw("add", _pointer(builder, address, IntType(64)), number, "monotonic")

    return types.int64(types.int64, types.int64), emit


def _compiled(signature: str, **options: bool) -> Callable[[Callable[..., Any]], Any]:
    """numba's decorator for a function of this signature. Machine code is kept on disk, or a warning says why not."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except Exception as error:
            # No such place, no room in it, or damaged. An error of the function is raised again below.
            warnings.warn(f"compiled loops are not kept on disk: {error!r}", RuntimeWarning, stacklevel=1)
            return numba.njit(signature, **options)(function)

    return compiled


@_compiled("void(int64, int64)")
def _prefetch_piece(source: int, length: int) -> None:
    for line in range(0, min(length, _PREFETCHED_BYTES), _LINE):
        _prefetch(source + line)


@_compiled("void(int64, int64, int64)")
def _stream(destination: int, source: int, length: int) -> None:
    head = min(-destination % _LINE, length)
    lines = (length - head) // _LINE * _LINE
    _memcpy(destination, source, head)
    for line in range(head, head + lines, _LINE):
        _stream_line(destination + line, source + line)
    copied = head + lines
    _memcpy(destination + copied, source + copied, length - copied)


@_compiled("void(int64[:], int64[:], int64[:], int64, int64, int64)")
def _stream_pieces(sources: Any, destinations: Any, lengths: Any, shift: int, first: int, last: int) -> None:
    for i in range(first, last):
        if i + _AHEAD < last:
            _prefetch_piece(sources[i + _AHEAD], lengths[i + _AHEAD])
            # Loads the page table entries of the destination, for which a store would wait.
            _prefetch(destinations[i + _AHEAD] + shift)
            _prefetch(destinations[i + _AHEAD] + shift + lengths[i + _AHEAD] - 1)
        _stream(destinations[i] + shift, sources[i], lengths[i])


@_compiled("void(int64[:], int64[:], int64[:])", nogil=True)
def _stream_all(sources: Any, destinations: Any, lengths: Any) -> None:
    _stream_pieces(sources, destinations, lengths, 0, 0, len(lengths))
    _fence()


@_compiled("void(int64[:], int64[:], int64[:])", nogil=True)
def _copy_all(sources: Any, destinations: Any, lengths: Any) -> None:
    for i in range(len(lengths)):
        if i + _AHEAD < len(lengths):
            _prefetch_piece(sources[i + _AHEAD], lengths[i + _AHEAD])
        _memcpy(destinations[i], sources[i], lengths[i])


@_compiled("int64(int64[:], int64[:], int64[:], int64, int64[:])", nogil=True)
def _copy_shares(sources: Any, destinations: Any, lengths: Any, shift: int, taken: Any) -> int:
    share, copied = max(1, len(lengths) // _SHARES), 0
    while True:
        first = _fetch_and_add(taken.ctypes.data, share)
        last = min(first + share, len(lengths))
        if last <= first:
            break
        _stream_pieces(sources, destinations, lengths, shift, first, last)
        copied += last - first
    _fence()
    return copied


def copy_runs(batch: Descriptors) -> None:
    """Copy every piece through the cache, for the next reader. Pieces do not overlap. Releases the GIL."""
    _copy_all(*batch)


def stream_runs(batch: Descriptors) -> None:
    """`copy_runs` past the cache: the copy takes less time, and the next reader more."""
    _stream_all(*batch)


class JointCopy:
    """A copy past the cache by several threads, which take shares of it. Pieces do not overlap.

    Destinations are addresses of another process. Its memory is mapped `shift` bytes further on here.
    """

    def __init__(self, batch: Descriptors, shift: int) -> None:
        self._batch = batch
        self._shift = shift
        self._taken = np.zeros(1, dtype=np.int64)
        """Pieces taken by threads."""
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._copying = 0
        """Threads that copy."""
        self._copied = 0
        """Pieces copied by threads that have ended."""
        self._over = False

    def help(self) -> None:
        """Copy shares until none is left or the copy is over. Releases the GIL."""
        with self._changed:
            if self._over:
                return
            self._copying += 1
        copied = 0
        try:
            copied = _copy_shares(*self._batch, self._shift, self._taken)
        finally:
            with self._changed:
                self._copying -= 1
                self._copied += copied
                self._changed.notify_all()

    def finish(self) -> None:
        """Copy the rest, and return when no thread copies. Raises RuntimeError if a thread failed."""
        try:
            self.help()
        finally:
            with self._changed:
                self._over = True
                self._changed.wait_for(lambda: not self._copying)
        if self._copied < len(self._batch.lengths):
            raise RuntimeError(f"{self._copied} of {len(self._batch.lengths)} pieces were copied")
