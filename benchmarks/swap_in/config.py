"""How `hisparse-pd bench swap-in` is configured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from base.flags import Flag
from benchmarks.swap_in.targets import BATCHES, MISSES


@dataclass(frozen=True, kw_only=True)
class SwapInBench:
    """The flags of the benchmark, and the cases, which have none."""

    top_k: Annotated[int, Flag("Selected positions per query.", min=1)] = 2048
    queries: Annotated[int, Flag("Queries per request: drafts and one.", min=1)] = 1
    device_buffer_size: Annotated[int, Flag("Hot slots per request.", min=1)] = 4096
    item_bytes: Annotated[int, Flag("Bytes of a token in one layer.", min=8)] = 1152
    context_length: Annotated[int, Flag("Tokens per request in the host pool.", min=1)] = 16384
    batches: tuple[int, ...] = BATCHES
    misses: tuple[int, ...] = MISSES
    swap_in_block_size: Annotated[int | None, Flag("Threads per block; default: by the device.")] = None
    json: Annotated[Path, Flag("Where to write every figure.")] = Path("bench-swap-in.json")
    png: Annotated[Path, Flag("Where to draw time against misses.")] = Path("bench-swap-in.png")
