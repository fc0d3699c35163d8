"""`hisparse-pd bench swap-in`: time per launch against misses and batch."""

import torch
from rich.console import Console
from rich.progress import track

from base.errors import StartupError
from benchmarks.device import need_cuda
from benchmarks.documents import check_writable
from benchmarks.plotting import check_installed
from benchmarks.swap_in.config import SwapInBench
from benchmarks.swap_in.launchers import Launcher, Ours, Peer, peer_version
from benchmarks.swap_in.report import CaseResult, Report, Timing, print_report, write_json, write_png
from benchmarks.swap_in.timing import copy_gb_per_s, graph_us, launch_floor_us, single_us
from benchmarks.swap_in.workload import Rotation, Shape, Tiers, turns
from hisparse.config import HiSparseConfig
from hisparse.cuda_swap_in import CudaSwapIn


def run_swap_in_bench(config: SwapInBench, console: Console | None = None) -> Report:
    """Measure, print the tables, write JSON and PNG. Raises StartupError before anything is measured."""
    shape = Shape(
        config.top_k, config.device_buffer_size, config.item_bytes, config.context_length, queries=config.queries
    )
    _check(config, shape)
    console = console or Console()
    tiers = Tiers(shape, max(config.batches))
    swap_in = CudaSwapIn(tiers.host, tiers.device, tiers.residency, shape.top_k, config.swap_in_block_size)
    peer = peer_version() if shape.queries == 1 else None
    cases = [(batch, misses) for batch in config.batches for misses in config.misses]
    results = []
    for batch, misses in track(cases, "swap-in", console=console, transient=True):
        rotation = Rotation(shape, batch, misses)
        results.append(
            CaseResult(
                batch=batch,
                misses=misses,
                num_bytes=rotation.num_bytes,
                cluster=swap_in.cluster_size(batch, shape.queries),
                swap_in=_time(Ours(tiers, swap_in, rotation)),
                resolve=_time(Ours(tiers, swap_in, rotation, fetch=0)),
                peer=_time(Peer(tiers, rotation)) if peer else None,
            )
        )
    report = Report(
        results=results,
        shape=shape,
        block_size=swap_in.block_size(shape.queries),
        device=torch.cuda.get_device_name(),
        floor_us=launch_floor_us(),
        copy_gb_per_s=copy_gb_per_s(),
        peer_version=peer,
    )
    tiers.close()
    print_report(report, console)
    write_json(config.json, report)
    write_png(config.png, report)
    console.print(f"wrote {config.json} and {config.png}", highlight=False)
    return report


def _time(launcher: Launcher) -> Timing:
    return Timing(graph_us=graph_us(launcher), single_us=single_us(launcher))


def _check(config: SwapInBench, shape: Shape) -> None:
    """Raises StartupError for what cannot be measured."""
    need_cuda("bench swap-in")
    if not config.batches or min(config.batches) < 1 or not config.misses or min(config.misses) < 0:
        raise StartupError("bench swap-in needs batches of 1 and more, and misses of 0 and more")
    for misses in config.misses:
        turns(shape, misses)
    # Refuses sizes that swap-in cannot have, and that would have it cut queries.
    HiSparseConfig(config.device_buffer_size, shape.union)
    check_installed()
    check_writable(config.json, config.png)
