"""`python -m benchmarks.decode_step`: a decode step through the KV tiers beside one with all KV resident in HBM.

Both run the same code: resident means a hot buffer as large as the context, from which nothing is ever missed. The
position table ends at 32,767 hot indices, so requests begin with 32,000 tokens rather than 32,768. HiSparse has a hot
buffer of twice the top-k.

How many positions a step misses decides what swap-in costs, and is a matter of the text. So it is set: each step
selects a given number of positions per request and layer that are not resident, and the same others as before, all
behind the real selection, whose cost stays. The random model's own selection, which is far more erratic than a trained
one's, is measured beside it.
"""

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode_step.report import HISPARSE, OWN, RESIDENT, CaseResult, print_results, write_json, write_png
from benchmarks.decode_step.timing import StepTiming, time_steps, use_streams
from benchmarks.decode_step.workload import GivenSelection, Requests, Shape, build_network, model_spec
from benchmarks.plotting import check_installed
from benchmarks.program import run
from benchmarks.swap_in.workload import Rotation
from benchmarks.swap_in.workload import Shape as RotationShape
from engine.runner import ModelRunner
from model.backends.choice import choose_backend
from model.backends.protocol import AttentionBackend
from model.network import Network
from model.sparse_model import SparseModel

_OWN_WARM_UP = 8


def main(
    batches: Annotated[list[int], typer.Option("--batch", min=1)] = [1, 16, 64],  # noqa: B006
    misses: Annotated[list[int], typer.Option(min=1, help="New positions per request, layer and step.")] = [32, 256],  # noqa: B006
    steps: Annotated[int, typer.Option(min=30)] = 30,
    own: Annotated[bool, typer.Option(help="Measure the model's own selection, too.")] = True,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-decode-step.json"),
    png_path: Annotated[Path, typer.Option("--png")] = Path("bench-decode-step.png"),
) -> None:
    """Time decode steps with HiSparse and with all KV in HBM, side by side."""
    if not torch.cuda.is_available():
        raise StartupError("the decode step benchmark needs a CUDA device")
    check_installed()
    device = torch.device("cuda", torch.cuda.current_device())
    shape, console = Shape(), Console()
    bench = DecodeStepBench(shape, build_network(shape, device), device, steps, console)
    streams = use_streams(device)
    for batch in batches:
        for tier, hot_size in ((HISPARSE, 2 * shape.top_k), (RESIDENT, shape.context_length)):
            bench.run(tier, batch, hot_size, misses, own)
            write_json(json_path, bench.results, shape)
    del streams
    print_results(bench.results, shape, console)
    write_png(png_path, bench.results)


class DecodeStepBench:
    """Measures case by case; `results` are there as soon as they are known."""

    def __init__(self, shape: Shape, network: Network, device: torch.device, steps: int, console: Console) -> None:
        self.results: list[CaseResult] = []
        self._shape = shape
        self._network = network
        self._device = device
        self._steps = steps
        self._console = console
        self._backend: AttentionBackend = choose_backend("auto", device, model_spec(shape))

    def run(self, tier: str, batch: int, hot_size: int, misses: list[int], own: bool) -> None:
        """Time all selections with a batch of requests that have `hot_size` hot slots each."""
        requests = Requests(self._shape, batch, hot_size, self._device)
        given = GivenSelection(self._backend, batch, self._shape.top_k, self._device)
        runner = self._record(requests, given)
        for count in misses:
            timing = self._time_given(requests, runner, given, count)
            expected = count if tier == HISPARSE else 0
            if timing.misses != expected:
                raise RuntimeError(f"{timing.misses} misses where {expected} are meant to be: the time means nothing")
            self._add(tier, requests, f"{count} new", timing)
        if own:
            runner = self._record(requests, self._backend)
            vocab = self._shape.vocab
            timing = time_steps(requests, runner, vocab, lambda _: None, _OWN_WARM_UP, self._steps)
            self._add(tier, requests, OWN, timing)
        requests.close()
        del requests, runner
        gc.collect()  # recorded steps and their coordinator refer to each other, and hold tens of gigabytes
        torch.cuda.empty_cache()

    def _time_given(self, requests: Requests, runner: ModelRunner, given: GivenSelection, misses: int) -> StepTiming:
        """Steps that select what misses `misses` positions in a hot buffer of twice the top-k."""
        shape = self._shape
        rotation = Rotation(
            RotationShape(shape.top_k, 2 * shape.top_k, requests.sizes.layout.item_bytes, shape.context),
            len(requests.ids),
            misses,
        )

        def select(number: int) -> None:
            given.positions.copy_(rotation.positions[number % rotation.length])

        return time_steps(requests, runner, shape.vocab, select, rotation.length, self._steps)

    def _record(self, requests: Requests, backend: AttentionBackend) -> ModelRunner:
        model = SparseModel(self._network, model_spec(self._shape), backend)
        return ModelRunner(model, requests.coordinator, len(requests.ids), self._shape.context_length, record=True)

    def _add(self, tier: str, requests: Requests, selection: str, timing: StepTiming) -> None:
        batch = len(requests.ids)
        self.results.append(CaseResult(batch, selection, tier, requests.sizes.hot_bytes, timing))
        self._console.print(f"batch {batch}, {selection}, {tier}: {timing.median_ms:.2f} ms")


if __name__ == "__main__":
    run(main)
