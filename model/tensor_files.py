"""Finds the tensors of a checkpoint in its safetensors files, and reads parts of them.

The format: a length of 8 bytes, a JSON header with dtype, shape and place of each tensor, and the tensors
(https://github.com/huggingface/safetensors).
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from base.errors import StartupError
from model.checkpoint import read_header

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
    """All tensors of the files, by name. Raises StartupError for a damaged file and for types that are not served."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        with file.open("rb") as stream:
            header = read_header(stream, file)
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise StartupError(f"{file} has {name} in {entry['dtype']}; served are {', '.join(_DTYPES)}")
            dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise StartupError(f"{file} has {end - begin} bytes of {name}, which is {list(shape)} of {dtype}")
            found[name] = StoredTensor(name, file, 8 + len(header) + begin, dtype, shape)
    return found
