"""`python -m benchmarks.overlap`: how long the device of a whole decode node waits for its host.

A gateway and a decode node with a published model's widths, fewer layers and random weights; clients that stream. The
node computes the prompts itself, before anything is measured. `--host-only` needs no device: it measures what the host
does in one turn of the node's loop.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from benchmarks.documents import check_writable
from benchmarks.machine import this_machine
from benchmarks.overlap.node import LONG_GAP_US, Record
from benchmarks.program import run
from benchmarks.serving.client import Client, Endpoint, Outcome
from benchmarks.serving.services import wait_ready
from benchmarks.serving.workload import RandomPrompts
from cli.serve import Child, die_with_parent, free_port, processes, terminate
from model.families import ShapeName, published_config
from model.tiny import write_tiny_checkpoint, write_without_weights

_ANSWER_TOKENS = 2048
_READY_S = 300.0
_RECORD_S = 240.0
_MODEL = "bench"
_STUB_STEP_MS = 20.0


def main(
    shape: ShapeName = "deepseek-v3.2",
    layers: Annotated[int, typer.Option(min=1)] = 16,
    routed_experts: Annotated[int, typer.Option(min=1, help="In each layer that is a mixture of experts.")] = 32,
    batches: Annotated[list[int], typer.Option("--batch", min=1)] = [1, 16, 64],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 4096,
    device: str = "cuda",
    host_only: Annotated[
        bool, typer.Option("--host-only", help="A tiny model, and a stub for its steps: what the host alone takes.")
    ] = False,
    speculative_num_steps: Annotated[int, typer.Option(min=0, max=3, help="Drafts of each request in a step.")] = 0,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-overlap.json"),
) -> None:
    """Measure steps of a decode node that streams."""
    check_writable(json_path)
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-overlap-") as directory:
        model = Path(directory) / "model"
        if host_only:
            write_tiny_checkpoint(model, "deepseek_v32", seed=0)
        else:
            write_without_weights(model, published_config(shape, layers, routed_experts))
        stub_ms = _STUB_STEP_MS if host_only else 0
        records = measure(model, sorted(batches), tokens, device, stub_ms, speculative_num_steps)
    machine = this_machine()
    document = {"machine": str(machine), "records": [vars(record) for record in records]}
    json_path.write_text(json.dumps(document, indent=2) + "\n")
    what = "a stub of a model" if host_only else f"{shape}, {layers} layers, {routed_experts} experts"
    table = Table(title=f"{what}, {tokens} tokens a request")
    columns = ["batch", "step, ms", "host, ms", "p90"]
    if not host_only:
        columns += ["kernels", "no kernel runs", f"> {LONG_GAP_US:.0f} us"]
    for column in columns:
        table.add_column(column, justify="right")
    for record in records:
        times = (f"{ms:.2f}" for ms in (record.step_ms, record.host_ms, record.host_p90_ms))
        device_cells = (str(record.kernels), f"{record.idle:.1%}", f"{record.waiting:.1%}")
        table.add_row(str(record.batch), *times, *(() if host_only else device_cells))
    console = Console()
    console.print(table)
    console.print(str(machine))


def measure(
    model: Path, batches: list[int], tokens: int, device: str, stub_step_ms: float, drafts: int
) -> list[Record]:
    """Records of these batch sizes, ascending. Raises StartupError for a node that does not start or brings none.

    stub_step_ms: what a step takes of which nothing is computed; 0: steps are computed. drafts: of each request.
    """
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    port, control_port = free_port(), free_port()
    # A stub's drafts are all right, and no answer may end before the last batch is recorded.
    answer_tokens = _ANSWER_TOKENS * (1 + drafts)
    common = ["--model-path", str(model), "--context-length", str(tokens + answer_tokens)]
    gateway = ["gateway", *common, "--served-model-name", _MODEL, "--port", str(port)]
    gateway += ["--control-port", str(control_port)]
    decode = ["decode", *common, "--gateway", f"127.0.0.1:{control_port}", "--port", "0", "--control-port", "0"]
    decode += ["--load-format", "dummy", "--device", device, "--allow-local-prefill", "--log-level", "warning"]
    decode += ["--max-running-requests", str(batches[-1]), "--speculative-num-steps", str(drafts)]
    records = model / "records"
    records.touch()
    url = f"http://127.0.0.1:{port}"
    with processes([Child("gateway", [*gateway, "--log-level", "warning"], port)]) as children:
        node = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.overlap.node", str(records), str(stub_step_ms), *decode],
            start_new_session=True,
            preexec_fn=die_with_parent,
            env=os.environ | {"TEARDOWN_CUPTI": "0"},  # else the profiler loses sight of recorded steps
        )
        try:
            wait_ready(url, {**children, "decode": node}, _READY_S)
            endpoint = Endpoint(_MODEL, url, _MODEL, extra_body={"return_token_ids": True})
            prompts = RandomPrompts(tokens, answer_tokens, vocab_size=vocab)
            return [asyncio.run(_record(endpoint, prompts, batch, records, node)) for batch in batches]
        finally:
            terminate([node])


async def _record(
    endpoint: Endpoint, prompts: RandomPrompts, batch: int, records: Path, node: "subprocess.Popen[bytes]"
) -> Record:
    """Have so many requests decoded until the node has written down what that took."""
    async with Client(endpoint, timeout=2 * _RECORD_S) as client:
        sending = [asyncio.create_task(client.send(endpoint.request(p))) for p in prompts.draw(batch, batch)]
        try:
            deadline = time.monotonic() + _RECORD_S
            while time.monotonic() < deadline and node.poll() is None:
                await asyncio.sleep(0.2)
                written = [Record(**json.loads(line)) for line in records.read_text().splitlines()]
                if found := next((record for record in written if record.batch == batch), None):
                    return found
                _check(sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    raise StartupError(f"the decode node did not come to {batch} requests that decode within {_RECORD_S:.0f} s")


def _check(sending: "list[asyncio.Task[Outcome]]") -> None:
    for task in sending:
        if task.done() and (failure := task.result().failure):
            raise StartupError(f"a request failed: {failure.kind}: {failure.message}")


if __name__ == "__main__":
    run(main)
