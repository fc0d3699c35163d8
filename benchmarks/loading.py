"""`python -m benchmarks.loading`: how fast a checkpoint in block-fp8 loads, beside what dd reads from the same disk.

Writes a checkpoint with a published model's widths and random weights, unless the directory has one (by default 24 GB),
and loads it: with its files out of the page cache, and then from it. dd reads some of the files before and others after
that, also not cached; a disk's speed may change within a minute.
"""

import ctypes
import json
import mmap
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from base.errors import StartupError
from base.memory import human
from benchmarks.machine import this_machine
from benchmarks.program import run
from kernels.fp8 import FP8, blocks
from kernels.operands import BlockFp8
from model.checkpoint import INDEX_FILE
from model.config import network_config
from model.families import ShapeName, published_config
from model.loader import load_model, read_spec
from model.network import Network
from model.stored_weights import SCALES
from model.tiny import quantization_config, write_without_weights
from model.weights import FP8_COLUMNS, Linear, Parts, Weights
from service.node_model import use_device

_SHARD_BYTES = 4 << 30
_RANDOM_BYTES = 64 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", FP8: "F8_E4M3"}
_WARM_LOADS = 2
_DD_SHARE = 3
"""One file of so many is read by dd before loading, and another one after it."""
_LEAST_CACHED = 0.01

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def main(
    directory: Annotated[Path, typer.Argument(help="Of the checkpoint; written if there is none.")],
    shape: ShapeName = "deepseek-v3.2",
    layers: Annotated[int, typer.Option(min=1)] = 5,
    routed_experts: Annotated[int, typer.Option(min=1, help="In each mixture.")] = 208,
    device: str = "cuda",
    dtype: str = "bfloat16",
) -> None:
    """Time the loading of a checkpoint."""
    where, kind = use_device(device), getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise StartupError(f"--dtype {dtype}: expected a type of torch, such as bfloat16")
    console = Console()
    begun = time.monotonic()
    if not (directory / "config.json").exists():
        write_checkpoint(directory, published_config(shape, layers, routed_experts))
    if not (files := sorted(directory.glob("*.safetensors"))):
        raise StartupError(f"{directory}: no *.safetensors are beside its config.json")
    size = sum(file.stat().st_size for file in files)
    forget(files)
    cached = cached_share(files)
    console.print(
        f"{human(size)} in {len(files)} files, written and on the disk after {time.monotonic() - begun:.0f} s"
    )
    table = Table("", "GB", "s", "GB/s", title=f"{device}, {dtype}")
    for done in timed(directory, files, where, kind):
        gigabytes = done.num_bytes / 1e9
        table.add_row(done.what, f"{gigabytes:.1f}", f"{done.seconds:.2f}", f"{gigabytes / done.seconds:.2f}")
    console.print(table)
    if cached > _LEAST_CACHED:
        console.print(
            f"{cached:.0%} of the files could not be taken out of the page cache: nothing here was not cached."
        )
    console.print(str(this_machine()))


@dataclass(frozen=True)
class Done:
    """What was done to files of so many bytes, and the time that it took."""

    what: str
    num_bytes: int
    seconds: float


def timed(directory: Path, files: Sequence[Path], device: torch.device, dtype: torch.dtype) -> Iterator[Done]:
    """Read and load what is not cached, load what is, and read again what is not."""
    size = sum(file.stat().st_size for file in files)
    yield _read("dd, not cached", files[::_DD_SHARE])
    forget(files)
    yield Done("loading, not cached", size, _load_seconds(directory, device, dtype))
    for _ in range(_WARM_LOADS):
        yield Done("loading, cached", size, _load_seconds(directory, device, dtype))
    forget(files)
    yield _read("dd, not cached, afterwards", files[1::_DD_SHARE] or files)


def _read(what: str, files: Sequence[Path]) -> Done:
    begun = time.monotonic()
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)
    return Done(what, sum(file.stat().st_size for file in files), time.monotonic() - begun)


def forget(files: Sequence[Path]) -> None:
    """Write files to the disk and take them out of the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[Path]) -> float:
    """What part of the files' pages is in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            flags = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(flags.ctypes.data)):
                raise OSError(ctypes.get_errno(), f"mincore of {file}")
            pages += len(flags)
            resident += int((flags & 1).sum())
    return resident / max(1, pages)


def _load_seconds(directory: Path, device: torch.device, dtype: torch.dtype) -> float:
    read_spec(directory, dtype)  # what is imported and read at a first use
    begun = time.monotonic()
    load_model(directory, dtype, device)
    return time.monotonic() - begun


def write_checkpoint(path: Path, config: Mapping[str, object]) -> None:
    """A checkpoint in block-fp8 with random numbers, as large as a published one of these sizes."""
    wanted = Wanted()
    Network.load(wanted, network_config(AutoConfig.for_model(**config)))
    path.mkdir(parents=True, exist_ok=True)
    shards: list[Tensors] = [{}]
    total = 0
    for name, (dtype, shape) in wanted.tensors.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and total + num_bytes > _SHARD_BYTES:
            shards.append({})
            total = 0
        shards[-1][name] = dtype, shape
        total += num_bytes
    file_of: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = path / f"model-{number:05}-of-{len(shards):06}.safetensors"
        _write_shard(file, tensors)
        file_of |= dict.fromkeys(tensors, file.name)
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    # Last: a checkpoint that was not written whole has no config.json, and is written again.
    write_without_weights(path, {**config, "quantization_config": quantization_config(BlockFp8(), [])})


def _write_shard(file: Path, tensors: Tensors) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = {dtype: _random_bytes(dtype) for dtype in _NAMES}
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for dtype, shape in tensors.values():
            left = torch.Size(shape).numel() * dtype.itemsize
            while left:
                left -= stream.write(random[dtype][:left])


def _random_bytes(dtype: torch.dtype) -> memoryview:
    numbers = torch.randn(_RANDOM_BYTES // dtype.itemsize, generator=torch.Generator().manual_seed(0))
    return memoryview((0.02 * numbers).to(dtype).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Wanted(Weights):
    """Notes which published tensors a network wants."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), torch.bfloat16)
        self.tensors: Tensors = {}

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        if name.endswith("kv_b_proj.weight"):
            self._note_fp8(name, tuple(shape))
        else:
            self.tensors[name] = dtype or self.dtype, tuple(shape)
        return self._empty(shape, dtype or self.dtype)

    def stack(self, maps: Sequence[Parts], columns: int, multiple: int = FP8_COLUMNS) -> Linear:
        for parts in maps:
            for name, rows in parts.items():
                self._note_fp8(f"{name}.weight", (rows, columns))
        return Linear(self._empty((len(maps), sum(maps[0].values()), columns), self.dtype))

    def _note_fp8(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensors[name] = FP8, shape
        self.tensors[f"{name}{SCALES}"] = torch.float32, tuple(map(blocks, shape))


if __name__ == "__main__":
    run(main)
