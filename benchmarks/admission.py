"""`python -m benchmarks.admission`: direct against staged admission of a long prompt.

From the moment the last byte of a prompt's KV has arrived until its first decode step is done. Directly, it has arrived
in the host pool. Staged, it has arrived in pages in HBM, as at a decode node without direct transfer, and goes to the
host pool by DMA first. The model is that of `benchmarks.decode_step`; both ways run the product's own code.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from benchmarks.decode_step.workload import GIB, Requests, Shape, build_network, model_spec
from benchmarks.machine import this_machine
from benchmarks.program import run
from engine.convert import kv_layout
from engine.decoding import Decoding
from engine.graphs import GraphDecoding
from engine.paged_pool import PagedKVPool, PagedSequence
from hisparse.coordinator import HiSparseCoordinator
from hisparse.extents import HostSlots
from hisparse.swap_in import StagedKV
from model.backends.choice import choose_backend
from model.sparse_model import SparseModel

_PAGE = 64
Arrive = Callable[[str, HostSlots, int], None]
"""Brings a request's KV from where it arrived to its host slots, and returns when it is there."""


@dataclass(frozen=True)
class Admission:
    """One way to admit a prompt: medians in milliseconds, and the device memory that only this way takes."""

    way: str
    copy_ms: float
    admit_ms: float
    first_step_ms: float
    total_ms: float
    hbm_bytes: int


def main(
    rounds: Annotated[int, typer.Option(min=3)] = 15,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-admission.json"),
) -> None:
    """Admit a prompt of 32,000 tokens directly and through staging, side by side."""
    if not torch.cuda.is_available():
        raise StartupError("the admission benchmark needs a CUDA device")
    device, shape = torch.device("cuda", torch.cuda.current_device()), Shape()
    spec = model_spec(shape)
    requests = Requests(shape, 1, 2 * shape.top_k, device)
    model = SparseModel(build_network(shape, device), spec, choose_backend("auto", device, spec))
    bench = AdmissionBench(requests, shape, GraphDecoding(model, requests.coordinator, 1, shape.context_length), rounds)
    results = [bench.direct(), bench.staged()]
    requests.close()
    print_results(results, shape, Console(width=120))
    document = {
        "device": torch.cuda.get_device_name(),
        "machine": asdict(this_machine()),
        "shape": asdict(shape),
        "admissions": [asdict(result) for result in results],
    }
    json_path.write_text(json.dumps(document, indent=1) + "\n")


class AdmissionBench:
    """Admits the one request of `requests`, whose KV is in the host pool, again and again."""

    def __init__(self, requests: Requests, shape: Shape, decoding: Decoding, rounds: int) -> None:
        self._coordinator = requests.coordinator
        self._id = requests.ids[0]
        self._shape = shape
        self._decoding = decoding
        self._rounds = rounds

    def direct(self) -> Admission:
        return self._measure("direct", lambda: _is_there)

    def staged(self) -> Admission:
        return self._measure("staged", lambda: Staging(self._coordinator, self._shape).copy)

    def _measure(self, way: str, prepare: Callable[[], Arrive]) -> Admission:
        before = _allocated_bytes(forget_peak=True)
        arrive = prepare()
        self._admit(arrive)  # what is loaded at its first use does not count
        times = [self._admit(arrive) for _ in range(self._rounds)]
        copy, admit, step = (statistics.median(part) for part in zip(*times, strict=True))
        total = statistics.median(sum(parts) for parts in times)
        return Admission(way, copy, admit, step, total, _allocated_bytes(peak=True) - before)

    def _admit(self, arrive: Arrive) -> tuple[float, float, float]:
        """Milliseconds until the KV is on the host, then until it is admitted, then until a token is computed."""
        slots = self._coordinator.retract_request(self._id)
        _wait()
        times = [time.perf_counter()]
        arrive(self._id, slots, self._shape.context)
        times.append(time.perf_counter())
        if not self._coordinator.admit_request_direct(self._id, slots, self._shape.context):
            raise RuntimeError("the pools have no room for the request that was just retracted")
        times.append(time.perf_counter())
        if self._coordinator.append_tokens([self._id]).short_of:
            raise RuntimeError("the pools have no room for its next token")
        self._decoding.step([self._id], [0])
        _wait()
        times.append(time.perf_counter())
        copied, admitted, stepped = (1e3 * (after - before) for before, after in pairwise(times))
        return copied, admitted, stepped


class Staging:
    """Device pages that hold a prompt of `shape.context` tokens, from which it goes to the host pool."""

    def __init__(self, coordinator: HiSparseCoordinator, shape: Shape) -> None:
        self._coordinator = coordinator
        pages = -(-shape.context // _PAGE)
        pool = PagedKVPool(kv_layout(model_spec(shape)), pages, _PAGE, coordinator.device.device)
        pool.kv.normal_()
        pool.index_keys.normal_()
        taken = pool.allocate(shape.context)
        assert taken is not None
        rows = PagedSequence(pool, taken).rows(0, shape.context)
        self.staged = StagedKV(list(pool.kv), list(pool.index_keys), rows, release=lambda: None)

    def copy(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> None:
        """See Arrive."""
        self._coordinator.admit_request_into_staging(request_id, host_slots, self.staged, num_tokens)
        while request_id not in self._coordinator.poll_staging().landed:
            pass


def print_results(results: list[Admission], shape: Shape, console: Console) -> None:
    """A line per way, and what the columns mean."""
    table = Table(box=None, pad_edge=False)
    for heading in ("admission", "copy ms", "admit ms", "first step ms", "total ms", "HBM GiB"):
        table.add_column(heading, justify="left" if heading == "admission" else "right", no_wrap=True)
    for result in results:
        times = (result.copy_ms, result.admit_ms, result.first_step_ms, result.total_ms)
        table.add_row(result.way, *(f"{ms:.2f}" for ms in times), f"{result.hbm_bytes / GIB:.3f}")
    console.print(table)
    console.print(
        f"{shape.context} tokens, {shape.layers} layers, hot buffer of {2 * shape.top_k}, "
        f"{torch.cuda.get_device_name()}. copy: from pages in HBM to the host pool. admit: until it is queued on the "
        "device; index keys go to HBM meanwhile. first step: all that it selects is missing. total: from the last "
        "byte's arrival to the end of the first step. HBM: the most that was taken beyond weights, KV tiers and "
        "recorded steps.",
        highlight=False,
    )


def _is_there(request_id: str, host_slots: HostSlots, num_tokens: int) -> None:
    """See Arrive: it was written there."""


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated_bytes(peak: bool = False, forget_peak: bool = False) -> int:
    """Device memory that tensors take now, or took at most; 0 without a CUDA device."""
    if not torch.cuda.is_available():
        return 0
    if forget_peak:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


if __name__ == "__main__":
    run(main)
