"""Time of one launch, inside CUDA graph replays and on its own, and the floors under it."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.graph_timing import elapsed_us
from benchmarks.swap_in.launchers import Launcher

_SLEEP_CYCLES = 600_000
"""Some 300 us in which the device waits before each single launch, so that even a slow host has queued it in time."""


def recorded(launcher: Launcher) -> Callable[[], None]:
    """A CUDA graph of a whole rotation: what replays it, once everything that it misses is what it should be."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _warm_up(launcher)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(launcher.rotation.length):
            launcher.launch(turn)
    graph.replay()
    return graph.replay


def graph_us(launcher: Launcher, min_ms: float = 10.0) -> float:
    """Microseconds per launch when whole rotations are replayed from a CUDA graph: the best of three times `min_ms`."""
    replay_once = recorded(launcher)
    replays = max(1, round(min_ms * 1e3 / elapsed_us(replay_once)))

    def replay() -> None:
        for _ in range(replays):
            replay_once()

    times = [elapsed_us(replay) for _ in range(3)]
    check_misses(launcher, 0)
    return min(times) / (replays * launcher.rotation.length)


def single_us(launcher: Launcher, launches: int = 60) -> float:
    """Microseconds between an event before and an event after one launch: the median."""
    _warm_up(launcher)
    time = _single_us(launcher.launch, launches)
    check_misses(launcher, launches)
    return time


def launch_floor_us(launches: int = 60) -> float:
    """The same for a kernel that writes four bytes: what launching and the events cost by themselves."""
    one = torch.zeros(1, device="cuda")
    return _single_us(lambda _: one.zero_(), launches)


def copy_gb_per_s(num_bytes: int = 2**30) -> float:
    """What the copy engine moves from pinned host memory to the device: the limit of the PCIe link. Best of three."""
    host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / 1e3 / min(elapsed_us(lambda: device.copy_(host, non_blocking=True)) for _ in range(3))


def _warm_up(launcher: Launcher) -> None:
    """From whatever was resident to what a rotation leaves: from here on each turn misses what it should."""
    for turn in range(launcher.rotation.length):
        launcher.launch(turn)
    check_misses(launcher, 0)


def check_misses(launcher: Launcher, turn: int) -> None:
    """Raise RuntimeError unless that selection would miss what the rotation promises."""
    expected = launcher.rotation.batch * launcher.rotation.misses
    if (missing := launcher.missing(turn)) != expected:
        raise RuntimeError(f"{missing} misses where {expected} are meant to be: the timing would mean nothing")


def _single_us(launch: Callable[[int], object], launches: int) -> float:
    events = [(_event(), _event()) for _ in range(launches)]
    for turn, (start, end) in enumerate(events):
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        launch(turn)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) * 1e3 for start, end in events)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
