"""Loads a network's tensors from a checkpoint's safetensors files (https://github.com/huggingface/safetensors).

`Network.load` says which tensors it wants and gets them empty. So all names and shapes are checked before anything is
read; then `fill` reads all, in the order in which they lie in the files.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import local

import torch

from base.errors import StartupError
from kernels.fp8 import BLOCK, FP8, blocks, dequantise, quantise_weight
from kernels.operands import BlockFp8
from model.checkpoint import read_header
from model.weights import FP8_COLUMNS, Linear, Parts, Weights, can_be_fp8

_PIECE_BYTES = 32 << 20
"""Read at once by a thread, which has two buffers of that size."""
_THREADS = 8
SCALES = "_scale_inv"
"""What the name of a weight's scales has after the name of the weight."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. begin: of its first byte in the file."""

    name: str
    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read_rows(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Read rows [start, stop) of the first dimension into a contiguous uint8 tensor of their size in main memory.

        Files are read and not mapped: reading does not stop at every page, several threads do it at once, and a file
        that is cut off meanwhile is an error and not a signal. Raises StartupError if bytes are missing.
        """
        buffer = memoryview(into.numpy())  # type: ignore[arg-type]
        offset, end = self.begin + start * self.row_bytes, self.begin + stop * self.row_bytes
        with self.file.open("rb", buffering=0) as stream:
            while offset < end:
                count = os.preadv(stream.fileno(), [buffer[offset - end :]], offset)
                if count == 0:
                    raise StartupError(f"{self.file} ends within {self.name}")
                offset += count


def find_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of the files, by name. Raises StartupError for a damaged file, for types that are not served, and for
    a name that two files have."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        with file.open("rb") as stream:
            header, tensors = read_header(stream, file)
        for name, entry in tensors.items():
            if entry["dtype"] not in _DTYPES:
                raise StartupError(f"{file} has {name} in {entry['dtype']}; served are {', '.join(_DTYPES)}")
            if name in found:
                raise StartupError(f"{file} has {name}, as {found[name].file.name} does: give one of both")
            dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise StartupError(f"{file} has {end - begin} bytes of {name}, which is {list(shape)} of {dtype}")
            found[name] = StoredTensor(name, file, 8 + len(header) + begin, dtype, shape)
    return found


@dataclass(frozen=True)
class _Copy:
    """A stored tensor, or rows of it, and where it goes.

    into: of the same shape as the rows, on the device. scales: of a block-fp8 tensor that is dequantised.
    scales_into: of a tensor that is quantised.
    """

    source: StoredTensor
    into: torch.Tensor
    rows: range
    scales: StoredTensor | None = None
    scales_into: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.source.row_bytes

    def pieces(self) -> "Iterator[_Copy]":
        """Copies of few bytes that make this one. Blocks of 128 rows are not divided."""
        count = max(1, _PIECE_BYTES // max(1, self.source.row_bytes) // BLOCK) * BLOCK
        for first in range(0, len(self.rows), count):
            rows = self.rows[first : first + count]
            part = slice(rows.start, rows.stop)
            block_part = slice(rows.start // BLOCK, blocks(rows.stop))
            scales_into = None if self.scales_into is None else self.scales_into[block_part]
            yield _Copy(self.source, self.into[part], rows, self.scales, scales_into)


class StoredWeights(Weights):
    """Tensors of a checkpoint.

    stored: by name. keeps: how weights in block-fp8 are computed with; None: they are dequantised. quantises: other
    linear maps become block-fp8, too. Names that are asked for and not stored are collected in `missing`.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: torch.dtype,
        keeps: BlockFp8 | None = None,
        quantises: bool = False,
    ) -> None:
        super().__init__(device, dtype)
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        self.used: set[str] = set()
        self._stored = stored
        self._keeps = keeps
        self._quantises = quantises and keeps is not None
        self._copies: list[_Copy] = []

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        into = self._empty(shape, dtype or self.dtype)
        self._copy(name, into)
        return into

    def unrounded(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        stored = self._stored.get(name)
        loses_nothing = stored is not None and stored.dtype == self.dtype
        return self.tensor(name, shape, self.dtype if loses_nothing else torch.float32)

    def stack(self, maps: Sequence[Parts], columns: int, multiple: int = FP8_COLUMNS) -> Linear:
        shape = (len(maps), sum(maps[0].values()), columns)
        in_fp8 = self._keeps is not None and can_be_fp8(maps[0], columns, multiple)
        in_fp8 &= all(self._quantises or self._is_fp8(f"{name}.weight") for parts in maps for name in parts)
        weight = self._empty(shape, FP8 if in_fp8 else self.dtype)
        scales = self._empty_scales(weight) if in_fp8 else None
        for number, parts in enumerate(maps):
            begin = 0
            for name, rows in parts.items():
                into = weight[number, begin : begin + rows]
                if scales is None:
                    self._copy(f"{name}.weight", into)
                else:
                    self._copy(f"{name}.weight", into, scales[number, begin // BLOCK : blocks(begin + rows)])
                begin += rows
        return Linear(weight, scales, self._keeps is not None and self._keeps.power_of_two)

    @property
    def bytes_to_read(self) -> int:
        """What `fill` reads."""
        return sum(copy.num_bytes for copy in self._copies)

    def fill(self, advance: Callable[[int], None] = lambda _: None) -> None:
        """Read everything that was asked for. Raises StartupError if a file cannot be read.

        advance: called with the number of bytes of each piece that has been read.
        """
        copies = sorted(self._copies, key=lambda copy: (copy.source.file, copy.source.begin))
        pieces = [piece for copy in copies for piece in copy.pieces()]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the memory of the tensors may have been in use
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "load") as pool:
            try:
                for piece, _ in zip(pieces, pool.map(_Reader(self.device).read, pieces), strict=True):
                    advance(piece.num_bytes)
            except OSError as error:
                raise StartupError(f"the weights cannot be read: {error}") from error
            finally:
                pool.shutdown(cancel_futures=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _is_fp8(self, name: str) -> bool:
        return name in self._stored and self._stored[name].dtype == FP8

    def _find(self, name: str, shape: Sequence[int]) -> StoredTensor | None:
        found = self._stored.get(name)
        if found is None:
            self.missing.append(name)
        elif found.shape != tuple(shape):
            self.misshapen.append(f"{name} is {list(found.shape)} instead of {list(shape)}")
        else:
            self.used.add(name)
            return found
        return None

    def _copy(self, name: str, into: torch.Tensor, scales_into: torch.Tensor | None = None) -> None:
        """scales_into: where the scales of a tensor go that is to be in block-fp8."""
        source = self._find(name, into.shape)
        if source is None:
            return
        rows, scales = range(len(into)), None
        if source.dtype == FP8:
            scales = self._find(f"{name}{SCALES}", [blocks(size) for size in into.shape])
            if scales is None:
                return
            if scales_into is not None:
                self._copies.append(_Copy(scales, scales_into, range(len(scales_into))))
                scales = scales_into = None
        self._copies.append(_Copy(source, into, rows, scales, scales_into))


class _Reader(local):
    """Reads pieces into tensors of a device.

    Every thread has two buffers in main memory, used in turns; on CUDA they are pinned, and a stream copies from them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @torch.inference_mode()
    def read(self, copy: _Copy) -> None:
        """Read a piece; on CUDA, its copy to the device may still be queued afterwards."""
        if self._device.type == "meta":
            return
        if self._device.type == "cpu" and copy.into.dtype == copy.source.dtype and copy.into.is_contiguous():
            copy.source.read_rows(copy.rows.start, copy.rows.stop, copy.into.view(torch.uint8).flatten())
            return
        with self._next_buffer(copy.num_bytes) as buffer:
            copy.source.read_rows(copy.rows.start, copy.rows.stop, buffer)
            shape = (len(copy.rows), *copy.source.shape[1:])
            values = buffer.to(self._device, non_blocking=True).view(copy.source.dtype).view(shape)
            if copy.scales is not None:
                values = dequantise(values, self._block_scales(copy.rows, copy.scales), copy.into.dtype)
            elif copy.scales_into is not None:
                values, scales = quantise_weight(values)
                copy.scales_into.copy_(scales)
            copy.into.copy_(values)

    def _block_scales(self, rows: range, scales: StoredTensor) -> torch.Tensor:
        begin, end = rows.start // BLOCK, blocks(rows.stop)
        stored = torch.empty((end - begin) * scales.row_bytes, dtype=torch.uint8)
        scales.read_rows(begin, end, stored)
        return stored.view(scales.dtype).view(end - begin, *scales.shape[1:]).to(self._device).float()

    @contextmanager
    def _next_buffer(self, count: int) -> Iterator[torch.Tensor]:
        """A buffer of `count` bytes, from which nothing is copied any more. What is queued meanwhile may read it."""
        turn, self._turn = self._turn, 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        if len(self._buffers[turn]) < count:
            pin = self._stream is not None
            self._buffers[turn] = torch.empty(max(count, _PIECE_BYTES), dtype=torch.uint8, pin_memory=pin)
        with torch.cuda.stream(self._stream):
            yield self._buffers[turn][:count]
            if self._stream is not None:
                self._copied[turn] = self._stream.record_event()
