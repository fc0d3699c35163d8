"""`hisparse-pd bench decode`: a decode step of a published shape, part by part, beside what the hardware takes."""

import gc
import math
from functools import partial

import torch
from rich.console import Console

from base.errors import StartupError
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.report import CaseResult, print_results, write_json, write_png
from benchmarks.decode.timing import time_steps, use_streams
from benchmarks.decode.workload import GivenSelection, Requests, build_model
from benchmarks.plotting import check_installed
from benchmarks.swap_in.timing import copy_gb_per_s
from benchmarks.swap_in.workload import Rotation, Shape
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
    new_positions = _numbers("--new-positions", config.new_positions or _NEW_POSITIONS, least=0)
    console = console or Console()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        idle = config.requests_in_group is not None and config.requests_in_group <= min(batches)
        model = build_model(config, device, drafts=config.speculative_num_steps > 0, idle=idle)
    except ValueError as error:
        raise StartupError(f"bench decode: {error}") from error
    link = copy_gb_per_s()
    streams = use_streams(device)
    results: list[CaseResult] = []
    for batch in batches:
        for result in _cases(config, model, batch, new_positions, link, device):
            results.append(result)
            console.print(f"batch {batch}, {result.new_positions} new: {result.timing.median_ms:.2f} ms")
            write_json(results, config)
    del streams
    print_results(results, config, model.num_bytes, console)
    write_png(results, config)
    return results


def _cases(
    config: DecodeBench, model: RankModel, batch: int, new_positions: list[int], link: float, device: torch.device
) -> list[CaseResult]:
    """Time a batch with each number of new positions. Raises RuntimeError if other numbers are missed."""
    spec, top_k, drafts = model.spec, model.spec.index_topk, config.speculative_num_steps
    hot_size = spec.context_length if config.resident else config.device_buffer_size
    requests = Requests(spec, config.context, batch, hot_size, device, drafts)
    given = GivenSelection(choose_backend("auto", device, spec), batch, top_k, device, 1 + drafts)
    runner = ModelRunner(
        SparseModel(model.network, spec, given),
        requests.coordinator,
        batch,
        spec.context_length,
        record=True,
        policy=DraftPolicy(drafts),
    )
    results = []
    for count in new_positions:
        shape = Shape(top_k, config.device_buffer_size, spec.kv_layout.item_bytes, config.context)
        rotation = Rotation(shape, batch, count)
        select = partial(_select, given.positions, rotation)
        timing = time_steps(requests, runner, spec.vocab_size, select, rotation.length, config.steps)
        # The draft layer selects what the last token selects.
        of_layers = (1 + drafts) * (spec.num_index_layers - (drafts > 0)) + (drafts > 0)
        expected = 0 if config.resident else count * of_layers / spec.num_index_layers
        if not math.isclose(timing.misses, expected):
            raise RuntimeError(f"{timing.misses} misses where {expected} are meant to be: the time means nothing")
        in_group = config.requests_in_group or batch * config.rank_of
        work = work_of_step(model, batch, config.context, 0 if config.resident else count, in_group, drafts)
        results.append(CaseResult(batch, count, requests.sizes.hot_bytes, timing, work, link))
    requests.close()
    del requests, runner, given
    gc.collect()  # recorded steps and their coordinator refer to each other, and hold gigabytes
    torch.cuda.empty_cache()
    return results


def _select(positions: torch.Tensor, rotation: Rotation, step: int) -> None:
    """Each token of a request selects the next of the rotation."""
    width = len(positions) // rotation.batch
    for place in range(width):
        positions[place::width] = rotation.positions[(step * width + place) % rotation.length]


def _numbers(flag: str, given: tuple[str, ...], least: int) -> list[int]:
    """Of words that are numbers or lists of them, such as 1,16,64."""
    try:
        numbers = [int(number) for word in given for number in word.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise StartupError(f"{flag} {' '.join(given)}: expected whole numbers from {least}")
    return numbers
