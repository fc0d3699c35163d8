"""`make demo`: a tiny checkpoint, three processes, one streamed completion, and a summary of its cost.

The prompt is several times longer than the hot buffer, so that decoding has to swap in from host memory.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from base.errors import StartupError
from cli.config import ServeConfig
from cli.serve import free_port, plan, processes, wait_ready

PROMPT_TOKENS = 1500
NEW_TOKENS = 96
HOT_BUFFER = 192
INDEX_TOPK = 64
MODEL = "tiny"
_READY_S = 120.0


def main() -> int:
    console = Console()
    # More threads would slow down a tiny model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-demo-") as directory:
        try:
            return run(console, Path(directory))
        except StartupError as error:
            console.print(f"[red]error:[/red] {error}")
            return 2
        except KeyboardInterrupt:
            console.print("stopped")
            return 130


def run(console: Console, directory: Path) -> int:
    """Make the checkpoint, serve it, stream one completion, print the summary."""
    from model.tiny import write_tiny_checkpoint

    model = directory / "tiny-deepseek_v32"
    write_tiny_checkpoint(model, "deepseek_v32", seed=1, index_topk=INDEX_TOPK)
    console.print(f"checkpoint: {model} (deepseek_v32, random weights, index top-k {INDEX_TOPK})")

    config = ServeConfig(
        model_path=model,
        served_model_name=MODEL,
        port=free_port(),
        transfer_protocol="tcp",
        chunked_prefill_size=512,
        hisparse_config=json.dumps({"device_buffer_size": HOT_BUFFER}),
    )
    children = plan(config).children()
    urls = {child.name: f"http://127.0.0.1:{child.http_port}" for child in children}
    log_path = directory / "log"
    with log_path.open("wb") as log, processes(children, log=log) as running:
        console.print(f"starting {', '.join(running)}: ZeroMQ between them, KV over Mooncake (TCP)")
        try:
            wait_ready(urls["gateway"], running, _READY_S)
            console.print(f"prompt of {PROMPT_TOKENS} tokens, hot buffer of {HOT_BUFFER}; {NEW_TOKENS} new tokens:")
            times = stream_completion(console, urls["gateway"])
            prefill, decode = read_metrics(urls["prefill-0"]), read_metrics(urls["decode-0"])
        except (StartupError, httpx.HTTPError):
            console.print(log_path.read_text()[-4000:], markup=False)
            raise
    console.print(summary(times, prefill, decode))
    return 0


def stream_completion(console: Console, base_url: str) -> list[float]:
    """Ask for a greedy completion of a random prompt and print its token ids as they arrive.

    Returns when it was asked for and when each token arrived (time.monotonic).
    """
    rng = random.Random(0)
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(256) for _ in range(PROMPT_TOKENS)],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    times = [time.monotonic()]
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for token_id in choice.get("token_ids") or ():
                    times.append(time.monotonic())
                    console.print(token_id, end=" ", highlight=False)
    console.print()
    return times


def read_metrics(base_url: str) -> dict[str, float]:
    """A process's metrics without labels, by name without prefix."""
    text = httpx.get(f"{base_url}/metrics", timeout=10).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {s.name.removeprefix("hisparse_pd_"): s.value for s in samples if not s.labels}


def summary(times: list[float], prefill: dict[str, float], decode: dict[str, float]) -> Table:
    """The cost of the completion, from the client's clock and the processes' metrics."""
    asked, first, last = times[0], times[1], times[-1]
    hits, misses = decode["swap_in_hits_total"], decode["swap_in_misses_total"]
    transferred, seconds = prefill["transfer_bytes_total"], prefill["transfer_seconds_sum"]
    table = Table(title="summary", show_header=False)
    table.add_row("tokens", f"{PROMPT_TOKENS} prompt, {len(times) - 1} generated")
    table.add_row("time to first token", f"{(first - asked) * 1e3:.0f} ms")
    table.add_row("time between tokens", f"{(last - first) / max(1, len(times) - 2) * 1e3:.1f} ms")
    table.add_row(
        "KV transferred",
        f"{transferred / 1e6:.2f} MB in {prefill['transfer_descriptors_total']:.0f} writes, "
        f"{seconds * 1e3:.1f} ms, {transferred / seconds / 1e9:.2f} GB/s",
    )
    table.add_row("swap-in", f"{hits:.0f} hits, {misses:.0f} misses ({hits / (hits + misses):.1%} hit rate)")
    table.add_row("fetched from host", f"{decode['swap_in_bytes_total'] / 1e6:.2f} MB")
    return table


if __name__ == "__main__":
    sys.exit(main())
