"""`hisparse-pd bench decode`: a decode step of a published shape, part by part, beside what the hardware takes."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.batch import DecodingBatch
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.report import CaseResult, print_results, write_json, write_png
from benchmarks.decode.selections import NewPositions, Selections, read_selections
from benchmarks.decode.timing import KernelTimes, use_streams
from benchmarks.decode.workload import build_model
from benchmarks.device import give_back_memory, need_cuda
from benchmarks.documents import check_writable
from benchmarks.plotting import check_installed
from benchmarks.swap_in.timing import copy_gb_per_s
from benchmarks.swap_in.workload import Shape
from model.roofline import RankModel, work_of_step

_BATCHES, _NEW_POSITIONS = ("1", "16"), ("0", "275")
_PROFILED_STEPS = 5


def run_decode_bench(config: DecodeBench, console: Console | None = None) -> list[CaseResult]:
    """Measure, print the tables, write JSON and PNG. Raises StartupError before anything is measured."""
    device = need_cuda("bench decode")
    check_installed()
    check_writable(config.json, config.png)
    batches = numbers("--batch", config.batches or _BATCHES, least=1)
    counts = config.new_positions or (() if config.selections else _NEW_POSITIONS)
    new_positions = numbers("--new-positions", counts, least=0) if counts else []
    console = console or Console()
    if config.resident and config.resident_rows:
        raise StartupError("--resident is the reference of --resident-rows: give one of them")
    try:
        idle = config.requests_in_group is not None and config.requests_in_group <= min(batches)
        model = build_model(config, device, drafts=config.speculative_num_steps > 0, idle=idle)
    except ValueError as error:
        raise StartupError(f"bench decode: {error}") from error
    selections_of(config, model, new_positions, config.device_buffer_size)  # refuses what cannot be selected
    link = copy_gb_per_s()
    streams = use_streams(device)
    results: list[CaseResult] = []
    for batch in batches:
        for result in _time(config, model, batch, new_positions, link, device):
            results.append(result)
            console.print(f"{result.name}: {result.timing.median_ms:.2f} ms")
            write_json(results, config)
        give_back_memory()
    kernels = list[KernelTimes]()
    for batch in batches:  # after everything is timed: the profiler makes all later steps longer
        kernels += _profile(config, model, batch, new_positions, device)
        give_back_memory()
    del streams
    results = [
        replace(result, timing=replace(result.timing, kernels=of_case))
        for result, of_case in zip(results, kernels, strict=True)
    ]
    write_json(results, config)
    print_results(results, config, model.num_bytes, console)
    write_png(results, config)
    return results


def selections_of(config: DecodeBench, model: RankModel, new_positions: list[int], hot_size: int) -> list[Selections]:
    """All that the flags name, for a hot buffer of this size. Raises StartupError for what cannot be selected."""
    shape = Shape(model.spec.index_topk, hot_size, model.spec.kv_layout.item_bytes, config.context)
    steps, queries = max(config.steps, _PROFILED_STEPS), 1 + config.speculative_num_steps
    counted: list[Selections] = [NewPositions(shape, count) for count in new_positions]
    return counted + [read_selections(word, shape, steps, queries) for word in config.selections]


def _time(
    config: DecodeBench, model: RankModel, batch: int, new_positions: list[int], link: float, device: torch.device
) -> Iterator[CaseResult]:
    """Time a batch with each of the selections. Raises RuntimeError if others are missed than are meant to be."""
    decoding, drafts = DecodingBatch(config, model, batch, device), config.speculative_num_steps
    # The draft layer selects what the last token selects: the part of all selections that can be misses.
    part = 1 - drafts / ((1 + drafts) * model.spec.num_index_layers)
    for selected in selections_of(config, model, new_positions, decoding.hot_size):
        timing = decoding.time(selected, config.steps)
        misses_nothing = config.resident or config.resident_rows
        expected = 0 if misses_nothing else None if config.pools_gib else selected.new_positions
        if expected is not None and not math.isclose(timing.misses, expected * part):
            raise RuntimeError(
                f"{timing.misses} misses where {expected * part} are meant to be: the time means nothing"
            )
        in_group = config.requests_in_group or batch * config.rank_of
        yield CaseResult(
            batch=batch,
            selections=selected.name,
            kv_bytes=decoding.pool.memory.nbytes,
            buffer=decoding.pool.device_buffer_size,
            whole=decoding.whole,
            timing=timing,
            work=work_of_step(model, batch, config.context, timing.misses / part, in_group, drafts),
            link_gb_per_s=link,
        )
    decoding.close()


def _profile(
    config: DecodeBench, model: RankModel, batch: int, new_positions: list[int], device: torch.device
) -> list[KernelTimes]:
    """Kernels of the same cases, in the same order."""
    decoding = DecodingBatch(config, model, batch, device)
    selections = selections_of(config, model, new_positions, decoding.hot_size)
    kernels = [decoding.profile(selected, _PROFILED_STEPS) for selected in selections]
    decoding.close()
    return kernels


def numbers(flag: str, given: tuple[str, ...], least: int) -> list[int]:
    """Of words that are numbers or lists of them, such as 1,16,64."""
    try:
        numbers = [int(number) for word in given for number in word.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise StartupError(f"{flag} {' '.join(given)}: expected whole numbers from {least}")
    return numbers
