"""`hisparse-pd bench prefill`: a chunk of a prompt of a published shape, part by part, beside the hardware's limits."""

from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.workload import build_model
from benchmarks.device import give_back_memory, need_cuda
from benchmarks.documents import check_writable
from benchmarks.plotting import check_installed
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.report import CaseResult, print_results, write_json, write_png
from benchmarks.prefill.timing import time_chunk
from benchmarks.prefill.workload import MarkedExchange, Prompt
from model.roofline import work_of_chunk


def run_prefill_bench(config: PrefillBench, console: Console | None = None) -> list[CaseResult]:
    """Measure, print the tables, write JSON and PNG. Raises StartupError before anything is measured."""
    device = need_cuda("bench prefill")
    check_installed()
    check_writable(config.json, config.png)
    contexts = config.lengths
    console = console or Console()
    try:
        model = build_model(config, device, lambda exchange: MarkedExchange(exchange, device), config.draft_layer)
    except ValueError as error:
        raise StartupError(f"bench prefill: {error}") from error
    chunk = config.chunked_prefill_size
    results: list[CaseResult] = []
    for context in contexts:
        prompt = Prompt(model, context, chunk, device)
        timing = time_chunk(prompt.compute, config.passes)
        work = work_of_chunk(model, context, chunk, config.rank_of)
        results.append(CaseResult(context, chunk, timing, work))
        console.print(f"{context} tokens of context: {timing.median_ms:.1f} ms")
        write_json(results, config)
        del prompt
        give_back_memory()
    print_results(results, config, model.num_bytes, console)
    write_png(results, config)
    return results
