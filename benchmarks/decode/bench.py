"""`hisparse-pd bench decode`: a decode step of a published shape, part by part, beside what the hardware takes."""

import gc
import math
from functools import partial

import torch
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.report import CaseResult, print_results, write_json, write_png
from benchmarks.decode.selections import NewPositions, Selections, read_selections
from benchmarks.decode.timing import PROFILED_STEPS, time_steps, use_streams
from benchmarks.decode.workload import GivenSelection, Requests, build_model
from benchmarks.parts_report import GIB
from benchmarks.plotting import check_installed
from benchmarks.swap_in.timing import copy_gb_per_s
from benchmarks.swap_in.workload import Shape
from engine.draft_policy import DraftPolicy
from engine.runner import ModelRunner
from model.loader import choose_backend
from model.roofline import RankModel, work_of_step
from model.sparse_model import SparseModel

_BATCHES, _NEW_POSITIONS = ("1", "16"), ("0", "275")


def run_decode_bench(config: DecodeBench, console: Console | None = None) -> list[CaseResult]:
    """Measure, print the tables, write JSON and PNG. Raises StartupError before anything is measured."""
    if not torch.cuda.is_available():
        raise StartupError("bench decode needs a CUDA device")
    check_installed()
    batches = _numbers("--batch", config.batches or _BATCHES, least=1)
    counts = config.new_positions or (() if config.selections else _NEW_POSITIONS)
    new_positions = _numbers("--new-positions", counts, least=0) if counts else []
    console = console or Console()
    device = torch.device("cuda", torch.cuda.current_device())
    if config.resident and (config.resident_rows or config.pools_gib):
        raise StartupError("--resident is the reference of --resident-rows and --pools-gib: give one of them")
    try:
        idle = config.requests_in_group is not None and config.requests_in_group <= min(batches)
        model = build_model(config, device, drafts=config.speculative_num_steps > 0, idle=idle)
    except ValueError as error:
        raise StartupError(f"bench decode: {error}") from error
    _selections(config, model, new_positions, config.device_buffer_size)  # refuses what cannot be selected
    link = copy_gb_per_s()
    streams = use_streams(device)
    results: list[CaseResult] = []
    for batch in batches:
        for result in _cases(config, model, batch, new_positions, link, device):
            results.append(result)
            console.print(f"{result.name}: {result.timing.median_ms:.2f} ms")
            write_json(results, config)
        gc.collect()  # recorded steps and their coordinator refer to each other, and hold gigabytes
        torch.cuda.empty_cache()
    del streams
    print_results(results, config, model.num_bytes, console)
    write_png(results, config)
    return results


def _selections(config: DecodeBench, model: RankModel, new_positions: list[int], hot_size: int) -> list[Selections]:
    """All that the flags name, for a hot buffer of this size. Raises StartupError for what cannot be selected."""
    shape = Shape(model.spec.index_topk, hot_size, model.spec.kv_layout.item_bytes, config.context)
    steps, queries = config.steps + PROFILED_STEPS, 1 + config.speculative_num_steps
    counted: list[Selections] = [NewPositions(shape, count) for count in new_positions]
    return counted + [read_selections(word, shape, steps, queries) for word in config.selections]


def _cases(
    config: DecodeBench, model: RankModel, batch: int, new_positions: list[int], link: float, device: torch.device
) -> list[CaseResult]:
    """Time a batch with each of the selections. Raises RuntimeError if others are missed than are meant to be."""
    spec, drafts = model.spec, config.speculative_num_steps
    hot_size = None if config.resident else config.device_buffer_size
    pool_bytes = int(config.pools_gib * GIB) if config.pools_gib else None
    requests = Requests(
        spec,
        config.context,
        batch,
        hot_size,
        device,
        drafts,
        config.resident_rows,
        pool_bytes,
        config.max_running_requests or batch,
    )
    given = GivenSelection(choose_backend("auto", device, spec), spec, requests, 1 + drafts)
    runner = ModelRunner(
        SparseModel(model.network, spec, given),
        requests.coordinator,
        batch,
        spec.context_length,
        record=True,
        policy=DraftPolicy(drafts),
    )
    # The draft layer selects what the last token selects: the part of all selections that can be misses.
    part = 1 - drafts / ((1 + drafts) * spec.num_index_layers)
    results = []
    hot_size = config.device_buffer_size if config.resident else requests.coordinator.device.device_buffer_size
    for selected in _selections(config, model, new_positions, hot_size):
        requests.restart()
        warm_up = selected.begin(spec.num_index_layers, batch, device)
        select = partial(_select, selected, requests, given.positions, config.resident)
        timing = time_steps(requests, runner, spec.vocab_size, select, warm_up, config.steps)
        misses_nothing = config.resident or config.resident_rows
        expected = 0 if misses_nothing else None if config.pools_gib else selected.new_positions
        if expected is not None and not math.isclose(timing.misses, expected * part):
            raise RuntimeError(
                f"{timing.misses} misses where {expected * part} are meant to be: the time means nothing"
            )
        in_group = config.requests_in_group or batch * config.rank_of
        work = work_of_step(model, batch, config.context, timing.misses / part, in_group, drafts)
        pool = requests.coordinator.device
        results.append(
            CaseResult(
                batch=batch,
                selections=selected.name,
                kv_bytes=pool.memory.nbytes,
                buffer=pool.device_buffer_size,
                whole=batch if config.resident else pool.resident_rows,
                timing=timing,
                work=work,
                link_gb_per_s=link,
            )
        )
    requests.close()
    return results


def _select(selected: Selections, requests: Requests, positions: torch.Tensor, resident: bool, step: int) -> None:
    """Have a step select what it is meant to. positions: of GivenSelection."""
    into = positions.view(len(positions), len(requests.ids), -1, positions.shape[2])
    selected.write(step, requests.newest, into)
    if resident:
        requests.to_slots(into)


def _numbers(flag: str, given: tuple[str, ...], least: int) -> list[int]:
    """Of words that are numbers or lists of them, such as 1,16,64."""
    try:
        numbers = [int(number) for word in given for number in word.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise StartupError(f"{flag} {' '.join(given)}: expected whole numbers from {least}")
    return numbers
