"""What a kernel of csrc/ is compiled with: its constants, block and shared memory. Each kernel's own is in its file."""

import ctypes
import re
from abc import ABC, abstractmethod
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
WARP = 32
MAX_BLOCK_SIZE = 1024
PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every device with clusters supports."""
VECTOR_BYTES = 16


class Specialization(ABC):
    """A kernel and the constants that it is compiled with.

    entry: its name, and that of its source. block_size: threads per block. max_cluster: blocks of its largest clusters.
    architecture_features: suffix of the architecture, "a" for what only that one has.
    """

    entry: str
    block_size: int
    max_cluster: int = 1
    architecture_features: str = ""

    @property
    def source(self) -> str:
        return f"{self.entry}.cu"

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory, at most."""
        return 0

    @abstractmethod
    def constants(self) -> dict[str, int | str]:
        """The names that the source uses and does not define, without THREADS."""

    def defines(self) -> dict[str, str]:
        return {name: str(value) for name, value in {"THREADS": self.block_size, **self.constants()}.items()}


def params_of(source: str, struct: str) -> type[ctypes.Structure]:
    """The struct of a kernel's parameters, as its source states it: fields of 8 bytes, which are pointers or i64."""
    body = (CSRC / source).read_text().partition(f"struct {struct} {{")[2].partition("};")[0]
    declared = [line.strip() for line in re.sub("//.*", "", body).split(";") if line.strip()]
    fields = [re.fullmatch(r"(?:(?:const )?\w+\*|i64) (\w+)", line) for line in declared]
    if not fields or not all(fields):
        raise TypeError(f"expected pointers and i64 as fields of {struct} in csrc/{source}, found {declared}")
    return type(struct, (ctypes.Structure,), {"_fields_": [(field[1], ctypes.c_int64) for field in fields if field]})
