"""`hisparse-pd prefill|decode --ranks N`: starts the ranks of a node, and ends all of them when one ends."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

import typer

from base.errors import ProcessFailed, StartupError
from cli.flags import changed_flags
from cli.serve import RANK_PORTS, Child, arguments, processes, terminate
from decode_node.config import DecodeConfig
from engine.agreement import GroupFailed
from engine.group_table import GroupTable
from engine.rank_place import RankPlace, create_places
from prefill_node.config import PrefillConfig
from service.lifecycle import STOP_SIGNALS

_LAST_WORDS_S = 2.0
"""How long ranks may take to tell gateways that they end, once one has ended."""
_FOLLOW_S = 3.0
"""How long after the first rank that ends in peace the others may end."""
_STOP_S = 15.0
"""How long beyond its time to drain a rank may take to stop."""
_POLL_S = 0.2

Processes = Mapping[str, "subprocess.Popen[bytes]"]


NodeOfRanks = PrefillConfig | DecodeConfig


def plan_ranks(config: NodeOfRanks, places: list[RankPlace]) -> list[Child]:
    """The processes of a node of several ranks. Raises StartupError for what such a node does not do."""
    if isinstance(config, DecodeConfig) and config.allow_local_prefill:
        raise StartupError(
            f"--allow-local-prefill with --ranks {config.ranks}: only a decode node of one rank computes prompts"
        )
    ports = [port for base in (config.port, config.control_port) if base for port in _ports(base, len(places))]
    if len(set(ports)) < len(ports) or max(ports, default=0) > 65535:
        raise StartupError(
            f"--port {config.port} and --control-port {config.control_port} with --ranks {config.ranks}: each rank "
            f"takes the ports {RANK_PORTS} above those of the rank before, which must be different ones up to 65535"
        )
    common = changed_flags(type(config), config)
    command = "prefill" if isinstance(config, PrefillConfig) else "decode"
    children = []
    for place in places:
        http_port = _port(config.port, place.rank)
        own = {
            "--port": http_port,
            "--control-port": _port(config.control_port, place.rank),
            "--device": _device(config.device, place.rank),
        }
        words = [command, *arguments({**common, **own})]
        children.append(Child(f"rank {place.rank}", words, http_port, place.variables(), place.descriptors))
    return children


def runner_of(config: NodeOfRanks) -> Callable[..., None]:
    """What runs a node of that kind: takes the configuration, and the place of a rank."""
    if isinstance(config, PrefillConfig):
        from prefill_node.process import run_prefill_node

        return run_prefill_node
    from decode_node.process import run_decode_node

    return run_decode_node


def run_ranks(config: NodeOfRanks) -> int:
    """Run a node of several ranks until it is stopped (returns 0), or until one of them ends (its exit code, or 1).

    SIGTERM drains all ranks, SIGINT ends them. The rank that ended first and the reason are said last, in one line.
    """
    # Rank 0 of a prefill node plans the steps of all. Decode ranks agree on each.
    places = create_places(config.ranks, lines=isinstance(config, PrefillConfig))
    children = plan_ranks(config, places)
    return supervise(children, GroupTable(places[0].table, len(places)), config.drain_timeout)


def supervise(children: list[Child], table: GroupTable, drain_timeout: float) -> int:
    """Run these ranks; see `run_ranks`."""
    deadlines: list[float] = []
    """When ranks that were told to stop must have ended: with each signal, by a later one."""

    def stop(number: int, frame: FrameType | None) -> None:
        drains = number == signal.SIGTERM and not deadlines
        deadlines.append(time.monotonic() + _STOP_S + (drain_timeout if drains else 0))
        for process in list(running.values()):
            process.send_signal(number)

    running: dict[str, subprocess.Popen[bytes]] = {}
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    with processes(children) as started:
        running |= started
        if deadlines:  # it came before there was anyone to tell
            terminate(list(started.values()), _LAST_WORDS_S)
        while (runs := _wait(started)) and not _failed(started, table):
            if deadlines and time.monotonic() > deadlines[-1]:
                break
            if not deadlines and any(process.returncode is not None for process in started.values()):
                deadlines.append(time.monotonic() + _FOLLOW_S)
        reason, code = "", 0
        if _failed(started, table):
            reason, code = _cause(started, table)
        elif runs:
            late = ", ".join(name for name, process in started.items() if process.poll() is None)
            reason, code = f"{late} did not end when the others did or were told to", 1
        terminate(list(started.values()), _LAST_WORDS_S)
    if reason:
        print(f"error: {reason}; all ranks were stopped", file=sys.stderr, flush=True)
    return code


def run_rank(config: NodeOfRanks, place: RankPlace) -> None:
    """Be one rank. Why it ends is left for the process that supervises it, which says it once for all ranks."""
    table = GroupTable(place.table, place.size)
    try:
        runner_of(config)(config, place)
    except GroupFailed as failure:
        table.report(place.rank, str(failure))
        raise typer.Exit(1) from failure
    except (StartupError, ProcessFailed) as error:
        code = 2 if isinstance(error, StartupError) else 1
        table.report(place.rank, f"rank {place.rank}: {error}", code)
        raise typer.Exit(code) from error
    except Exception as error:
        table.report(place.rank, f"rank {place.rank}: {type(error).__name__}: {error}")
        raise


def _wait(started: Processes) -> bool:
    """Wait a while, at most until one ends. Whether any still runs."""
    running = [process for process in started.values() if process.poll() is None]
    ends = [os.pidfd_open(process.pid) for process in running]
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    if ends:
        poll.poll(_POLL_S * 1000)
    for end in ends:
        os.close(end)
    return bool(running)


def _failed(started: Processes, table: GroupTable) -> bool:
    """Whether a rank says that it fails, or ended otherwise than in peace or by a signal to stop."""
    peaceful = (None, 0, *(-number for number in STOP_SIGNALS))
    return any(
        process.returncode not in peaceful or table.reported(rank) is not None
        for rank, process in enumerate(started.values())
    )


def _cause(started: Processes, table: GroupTable) -> tuple[str, int]:
    """Which rank failed and why, and the exit code for it.

    If several have: one that was killed, else one that says what happened to itself rather than to another.
    """
    found = []
    for rank, process in enumerate(started.values()):
        code, said = process.poll(), table.reported(rank)
        if code is not None and code < 0:
            found.append((0, f"rank {rank} was killed by {signal.Signals(-code).name}", 1))
        elif said is not None:
            blames_another = not said[0].startswith(f"rank {rank}")
            found.append((1 + blames_another, *said))
        elif code:
            found.append((1, f"rank {rank} ended with code {code}", code))
    _, text, code = min(found)
    return text, code


def _ports(base: int, ranks: int) -> list[int]:
    return [_port(base, rank) for rank in range(ranks)]


def _port(base: int, rank: int) -> int:
    """That of a rank; 0, for any that is free, stays 0."""
    return base + RANK_PORTS * rank if base else 0


def _device(device: str, rank: int) -> str:
    """That of a rank: the CPU for all, or GPUs one after the other."""
    kind, _, first = device.partition(":")
    return f"cuda:{int(first or 0) + rank}" if kind == "cuda" and (first or "0").isdecimal() else device
