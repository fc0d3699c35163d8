"""Copies scattered pieces of memory within this process, as fast as memory allows.

The loops are compiled when this module is first imported, which takes seconds: only processes that copy import it.
NumPy has no one-pass copy of runs that are scattered on both sides, and its gathers and scatters of rows reach a
quarter of this.

Two things make small pieces as fast as large ones. The processor does not guess where the next piece begins, so it is
prefetched some pieces ahead. And a store to memory that is not in the cache first reads it, so what this process will
not read soon is written past the cache, by non-temporal stores.
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
"""Pieces between the one that is prefetched and the one that is copied."""
_PREFETCHED_BYTES = 2048
"""Of a piece, at most: the processor prefetches the rest of it by itself."""
_SHARES = 32
"""Of a batch: few, so that threads seldom ask for one; enough for them to end at about the same time."""
_LINE = 64
_VECTOR = 32
"""Bytes of a vector store, to which its destination must be aligned."""


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
    """numba's decorator for a function of this signature, whose machine code is kept on disk if that can be written to.

    Beside this file, or where numba keeps such code for the user. From there it takes a quarter of the time. Where that
    cannot be, a warning says why.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except Exception as error:
            # There is no such place, no room in it, or it was damaged. What is wrong with the function is raised below.
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
            # So that it is known where the pages of the destination lie, for which a store would wait.
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
    """Copy every piece through the cache, for what a processor reads next.

    The addresses are this process's own, and the pieces do not overlap. Releases the GIL.
    """
    _copy_all(*batch)


def stream_runs(batch: Descriptors) -> None:
    """The same past the cache: the copy takes less time, and the next reader more."""
    _stream_all(*batch)


class JointCopy:
    """A copy of pieces, which do not overlap, past the cache, by several threads that take shares of it.

    Destinations are addresses of another process, whose memory lies `shift` bytes further on here.
    """

    def __init__(self, batch: Descriptors, shift: int) -> None:
        self._batch = batch
        self._shift = shift
        self._taken = np.zeros(1, dtype=np.int64)
        """Pieces that threads have taken so far."""
        self._changed = threading.Condition()
        """Guards the rest."""
        self._copying = 0
        """Threads that are copying."""
        self._copied = 0
        """Pieces copied by threads that have ended."""
        self._over = False

    def help(self) -> None:
        """Copy shares until none is left. Does nothing if the copy is over. Releases the GIL."""
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
        """Copy what is left, and return when no thread copies any more. Raises RuntimeError if one failed."""
        try:
            self.help()
        finally:
            with self._changed:
                self._over = True
                self._changed.wait_for(lambda: not self._copying)
        if self._copied < len(self._batch.lengths):
            raise RuntimeError(f"{self._copied} of {len(self._batch.lengths)} pieces were copied")
