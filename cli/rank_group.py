"""`hisparse-pd prefill|decode --ranks N`: starts the ranks of a node, and ends all of them when one ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from types import FrameType

import typer

from base.errors import ProcessFailed, StartupError
from cli.flags import changed_flags
from cli.reasons import leave
from cli.serve import RANK_PORTS, Child, arguments, processes, terminate
from control.messages import ADDRESS_PATTERN
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from ranks.barrier import GroupFailed
from ranks.place import RankPlace, create_places
from ranks.status import SharedStatus
from ranks.watch import Watchdog
from service.config import check_processes
from service.lifecycle import STOP_SIGNALS

_LAST_WORDS_S = 2.0
"""How long ranks may take to tell gateways that they end, once one has ended."""
_FOLLOW_S = 3.0
"""How long after the first rank that ends in peace, or the loss of another host, the others may end."""
_STOP_S = 15.0
"""How long beyond its time to drain a rank may take to stop."""
_POLL_S = 0.2

Processes = Mapping[str, "subprocess.Popen[bytes]"]
NodeOfRanks = PrefillConfig | DecodeConfig


def check_hosts(config: NodeOfRanks) -> None:
    """Raises StartupError if --nnodes, --node-rank and --dist-init-addr do not say where this host stands."""
    hosts, meeting = config.nnodes, config.dist_init_addr
    if config.node_rank >= hosts:
        raise StartupError(f"--node-rank {config.node_rank} with --nnodes {hosts}: expected 0 to {hosts - 1}")
    if meeting is None and hosts > 1:
        raise StartupError(
            f"--nnodes {hosts} without --dist-init-addr: the hosts need HOST:PORT of the one with --node-rank 0"
        )
    if meeting is not None and hosts == 1:
        raise StartupError(f"--dist-init-addr {meeting} without --nnodes: a node of one host meets nobody")
    if meeting is not None:
        if not re.match(ADDRESS_PATTERN, meeting):
            raise StartupError(f"--dist-init-addr {meeting}: expected HOST:PORT, a host name or an IPv4 address")
        check_processes("--dist-init-addr", meeting.rpartition(":")[0], config.key_dir, config.insecure)
    if config.ranks % hosts:
        raise StartupError(f"--ranks {config.ranks} with --nnodes {hosts}: each host has as many ranks as the others")


def plan_ranks(config: NodeOfRanks, places: list[RankPlace]) -> list[Child]:
    """The processes of a node of several ranks on this host. Raises StartupError for what such a node does not do.

    Ports and devices are counted from the first rank of the host: all hosts are configured alike.
    """
    if isinstance(config, DecodeConfig) and config.allow_local_prefill:
        raise StartupError(
            f"--allow-local-prefill with --ranks {config.ranks}: only a decode node of one rank computes prompts"
        )
    ports = [_port(base, rank) for base in (config.port, config.control_port) if base for rank in range(len(places))]
    if len(set(ports)) < len(ports) or max(ports, default=0) > 65535:
        raise StartupError(
            f"--port {config.port} and --control-port {config.control_port} with --ranks {config.ranks}: each rank "
            f"takes the ports {RANK_PORTS} above those of the rank before, which must be different ones up to 65535"
        )
    common = changed_flags(type(config), config)
    command = "prefill" if isinstance(config, PrefillConfig) else "decode"
    children = []
    for number, place in enumerate(places):
        http_port = _port(config.port, number)
        own = {
            "--port": http_port,
            "--control-port": _port(config.control_port, number),
            "--device": _device(config.device, number),
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

    SIGTERM drains all ranks, SIGINT ends them. The rank that ended first and the reason are said last, in one line. Of
    a node of several hosts these are the ranks of this one; they end when those of another host do.
    """
    # Rank 0 of a prefill node plans the steps of all. Decode ranks agree on each.
    places = create_places(
        config.ranks,
        isinstance(config, PrefillConfig),
        config.nnodes,
        config.node_rank,
        config.dist_init_addr or "",
    )
    children = plan_ranks(config, places)
    status = SharedStatus(places[0].status, config.ranks)
    return supervise(children, status, config.drain_timeout, config.step_timeout, places[0].rank)


def supervise(
    children: list[Child], status: SharedStatus, drain_timeout: float, step_timeout: float, first: int = 0
) -> int:
    """Run these ranks, the first of which is `first`; see `run_ranks`."""
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
        own = range(first, first + len(children))
        others = set(range(status.size)) - set(own)
        hung = Watchdog(status, own, step_timeout, _POLL_S)
        lost_at: float | None = None
        while (runs := _wait(started)) and not _failed(started, status, first):
            if deadlines and time.monotonic() > deadlines[-1]:
                break
            if lost_at is None and status.first_reported(others) is not None:
                lost_at = time.monotonic()
            if lost_at is not None and time.monotonic() > lost_at + _FOLLOW_S:
                break  # What its device waits for never comes.
            if (rank := hung.look(time.monotonic())) is not None:
                # What follows is what follows the end of any rank.
                status.report(rank, f"rank {rank} hangs: its loop has not turned for {hung.patience:g} s")
                started[f"rank {rank}"].kill()
            if not deadlines and any(process.returncode is not None for process in started.values()):
                deadlines.append(time.monotonic() + _FOLLOW_S)
        reason, code = "", 0
        if _failed(started, status, first) or status.first_reported(others) is not None:
            reason, code = _cause(started, status, first)
        elif runs:
            late = ", ".join(name for name, process in started.items() if process.poll() is None)
            reason, code = f"{late} did not end when the others did or were told to", 1
        terminate(list(started.values()), _LAST_WORDS_S)
    if reason:
        leave(reason)
        print(f"error: {reason}; all ranks were stopped", file=sys.stderr, flush=True)
    return code


def run_rank(config: NodeOfRanks, place: RankPlace) -> None:
    """Be one rank. Why it ends is left for the process that supervises it, which says it once for all ranks."""
    status = SharedStatus(place.status, place.size)
    try:
        runner_of(config)(config, place)
    except GroupFailed as failure:
        status.report(place.rank, str(failure))
        raise typer.Exit(1) from failure
    except (StartupError, ProcessFailed) as error:
        code = 2 if isinstance(error, StartupError) else 1
        status.report(place.rank, f"rank {place.rank}: {error}", code)
        raise typer.Exit(code) from error
    except Exception as error:
        status.report(place.rank, f"rank {place.rank}: {type(error).__name__}: {error}")
        raise


def _wait(started: Processes) -> bool:
    """Wait a while, at most until one ends. Whether any still runs."""
    running = [process for process in started.values() if process.poll() is None]
    ends = [os.pidfd_open(process.pid) for process in running]
    if ends:
        wait(ends, _POLL_S)
    for end in ends:
        os.close(end)
    return bool(running)


def _failed(started: Processes, status: SharedStatus, first: int) -> bool:
    """Whether a rank of this host says that it fails, or ended otherwise than in peace or by a signal to stop."""
    peaceful = (None, 0, *(-number for number in STOP_SIGNALS))
    return any(
        process.returncode not in peaceful or status.reported(rank) is not None
        for rank, process in enumerate(started.values(), first)
    )


def _cause(started: Processes, status: SharedStatus, first: int) -> tuple[str, int]:
    """Which rank failed and why, and the exit code for it.

    If several have: one that was killed and of which no reason is known, else one of which it is known what happened to
    it, else the first of another host and what was seen of its end, else one that says what happened to another.
    """
    ours = dict(enumerate(started.values(), first))
    lost = status.first_reported(rank for rank in range(status.size) if rank not in ours)
    found = []
    for rank in (*ours, *(() if lost is None else (lost,))):
        code, said = ours[rank].poll() if rank in ours else None, status.reported(rank)
        blames_another = said is not None and not said[0].startswith(f"rank {rank}")
        if code is not None and code < 0 and (said is None or blames_another):
            found.append((0, f"rank {rank} was killed by {signal.Signals(-code).name}", 1))
        elif said is not None:
            found.append((3 if blames_another else 1 if rank in ours else 2, *said))
        elif code:
            found.append((1, f"rank {rank} ended with code {code}", code))
    _, text, code = min(found)
    return text, code


def _port(base: int, rank: int) -> int:
    """That of a rank; 0, for any that is free, stays 0."""
    return base + RANK_PORTS * rank if base else 0


def _device(device: str, rank: int) -> str:
    """That of a rank: the CPU for all, or GPUs one after the other."""
    kind, _, first = device.partition(":")
    return f"cuda:{int(first or 0) + rank}" if kind == "cuda" and (first or "0").isdecimal() else device
