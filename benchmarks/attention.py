"""`python -m benchmarks.attention`: the attention backends on a GPU, in the shapes of DeepSeek-V3.2.

A decode step's attention and selection are timed inside CUDA graph replays, a prompt chunk's between events. Each turn
of a graph reads rows or pages of its own, more in all than the device caches, as one layer after another does.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from benchmarks.machine import this_machine
from benchmarks.program import run
from hisparse.format import DenseFormat
from model.backends.protocol import AttentionBackend
from model.backends.torch_backend import TorchBackend
from model.indexer import IndexQueries

SCHEMA = 1
LATENT_DIM, ITEM_DIM, TOPK = 512, 576, 2048
INDEX_HEADS, INDEX_DIM, PAGE_SIZE = 64, 128, 64
HEADS = (16, 128)
BATCHES = (1, 4, 16, 64)
CHUNK = 2048

FORMAT = DenseFormat(torch.bfloat16, ITEM_DIM, INDEX_DIM)
_NUM_ROWS = 1 << 20
_UNCACHED_BYTES = 256 << 20
_SCALING = 0.1
_REPLAYS = 9

Work = Callable[[int], object]
"""Launches turn number i of something."""


@dataclass(frozen=True)
class Case:
    """One thing to time. num_bytes: items or keys that it has to read once. turns: how often in one graph; 0: none."""

    name: str
    batch: int
    num_bytes: int
    turns: int
    work: Callable[[AttentionBackend], Work]


@dataclass(frozen=True)
class CaseResult:
    """Median microseconds of each backend."""

    name: str
    batch: int
    num_bytes: int
    us: dict[str, float]


def main(
    context_length: Annotated[int, typer.Option(min=TOPK, help="Tokens per sequence that are scored.")] = 32768,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-attention.json"),
) -> None:
    """Time the torch and the Triton backend side by side."""
    if not torch.cuda.is_available():
        raise StartupError("the attention benchmark needs a CUDA device")
    # Here, since a machine without CUDA need not have Triton.
    from model.backends.triton_backend import TritonBackend

    torch.set_default_device("cuda")
    backends: dict[str, AttentionBackend] = {"torch": TorchBackend(FORMAT), "triton": TritonBackend(FORMAT)}
    results = []
    for case in cases(context_length):
        us = {name: median_us(case.work(backend), case.turns) for name, backend in backends.items()}
        results.append(CaseResult(case.name, case.batch, case.num_bytes, us))
    print_results(results, context_length, Console())
    document = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "machine": asdict(this_machine()),
        "context_length": context_length,
        "results": [asdict(result) for result in results],
    }
    json_path.write_text(json.dumps(document, indent=2) + "\n")


def cases(context_length: int) -> Iterator[Case]:
    """What a decode step does at each batch size, then what a prompt's chunk does at the end of its context."""
    for heads in HEADS:
        for batch in BATCHES:
            yield attend_case(f"attend, {heads} heads", heads, batch, graph=True)
    for batch in BATCHES:
        yield decode_selection_case(batch, context_length)
    yield attend_case("attend a chunk, 16 heads", 16, CHUNK, graph=False)
    yield prompt_selection_case(context_length)


def attend_case(name: str, heads: int, queries: int, graph: bool) -> Case:
    """Attention of queries to TOPK rows each."""
    num_bytes = queries * TOPK * ITEM_DIM * 2
    turns = _turns(num_bytes) if graph else 0
    kv = torch.randn(_NUM_ROWS, ITEM_DIM, dtype=torch.bfloat16)
    query = torch.randn(queries, heads, ITEM_DIM, dtype=torch.bfloat16)
    rows = torch.randint(0, _NUM_ROWS, (max(1, turns), queries, TOPK))
    return Case(
        name,
        queries,
        num_bytes,
        turns,
        lambda backend: lambda turn: backend.attend_rows(query, kv, rows[turn], _SCALING, LATENT_DIM),
    )


@dataclass(frozen=True)
class _Pages:
    """`PagedKeys` as a recorded step has them: the host does not know the lengths."""

    keys: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: None = None


def decode_selection_case(batch: int, context_length: int) -> Case:
    """Scores and top-k of one new token of each request."""
    pages_each = -(-context_length // PAGE_SIZE)
    num_bytes = batch * pages_each * PAGE_SIZE * INDEX_DIM * 2
    turns = _turns(num_bytes)
    keys = torch.randn(turns * batch * pages_each, PAGE_SIZE, INDEX_DIM, dtype=torch.bfloat16)
    tables = torch.randperm(len(keys)).view(turns, batch, pages_each)
    seq_lens = torch.full((batch,), context_length)
    index = _index_inputs(batch)
    return Case(
        "select",
        batch,
        num_bytes,
        turns,
        lambda backend: lambda turn: backend.select_for_decode(index, _Pages(keys, tables[turn], seq_lens), TOPK),
    )


def prompt_selection_case(context_length: int) -> Case:
    """Scores and top-k of the last CHUNK tokens of a prompt."""
    keys = torch.randn(context_length, INDEX_DIM, dtype=torch.bfloat16)
    index, start = _index_inputs(CHUNK), context_length - CHUNK
    return Case(
        "select for a chunk",
        CHUNK,
        keys.nbytes,
        0,
        lambda backend: lambda _: backend.select_for_prompt(index, keys, start, context_length, TOPK),
    )


def _index_inputs(tokens: int) -> IndexQueries:
    return IndexQueries(
        queries=torch.randn(tokens, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16),
        head_weights=torch.randn(tokens, INDEX_HEADS),
    )


def _turns(num_bytes: int) -> int:
    return max(2, -(-_UNCACHED_BYTES // num_bytes))


def median_us(work: Work, turns: int) -> float:
    """Microseconds of one turn: the median of replays of a graph of all turns, or of single calls if there are none."""
    work(0)
    torch.cuda.synchronize()
    if turns == 0:
        return statistics.median(_elapsed_us(lambda: work(0)) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            work(turn)
    graph.replay()
    return statistics.median(_elapsed_us(graph.replay) for _ in range(_REPLAYS)) / turns


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def print_results(results: list[CaseResult], context_length: int, console: Console) -> None:
    """A line per case, and what the columns mean."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "queries", "torch us", "triton us", "ratio", "triton GB/s"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for result in results:
        torch_us, triton_us = result.us["torch"], result.us["triton"]
        speed = f"{result.num_bytes / triton_us / 1e3:.0f}"
        cells = (f"{torch_us:.1f}", f"{triton_us:.1f}", f"{torch_us / triton_us:.2f}", speed)
        table.add_row(result.name, str(result.batch), *cells)
    console.print(table)
    console.print(
        f"bfloat16, items of {ITEM_DIM}, top-k {TOPK}; selection: {INDEX_HEADS} heads of {INDEX_DIM} over "
        f"{context_length} tokens. GB/s counts the items or keys once, whatever was read again. "
        f"{torch.cuda.get_device_name()}",
        highlight=False,
    )


if __name__ == "__main__":
    run(main)
