"""`hisparse-pd bench transfer`: who plays which role, and what becomes of the figures."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from base.errors import StartupError
from base.logs import configure_logging
from base.version import VERSION
from benchmarks.disturbance import Disturbance
from benchmarks.machine import Machine, this_machine
from benchmarks.transfer import nixl_agent, wire
from benchmarks.transfer.cases import Case, Group, Protocol
from benchmarks.transfer.config import TransferBench
from benchmarks.transfer.initiator import Initiator, Plan
from benchmarks.transfer.overlap import Overlap, measure_overlap
from benchmarks.transfer.plot import write_png
from benchmarks.transfer.report import Report, document, print_report, write_json
from benchmarks.transfer.target import listen
from benchmarks.transfer.workbench import Workbench

_QUICK_ROUNDS, _QUICK_SLOW_S = 3, 0.3
_ROUNDS, _SLOW_S = 15, 2.0
_LET_GO_S = 5.0


def run_transfer_bench(config: TransferBench) -> None:
    """Measure and report, or be the target until the initiator goes.

    Raises StartupError for what cannot be started, MethodFailed for a method that fails or leaves wrong bytes.
    """
    config.check()
    configure_logging("warning", "text", f"bench {config.role}")
    if config.role == "target":
        listen(config.host, config.port, config.ib_device, announce=_announce)
        return
    _publish(config, _measure(config))


def _measure(config: TransferBench) -> Report:
    cases = config.sweep.cases(config.quick)
    disturbance = Disturbance()
    with _target(config) as link:
        welcome = link.ask(wire.Hello(version=VERSION), wire.Welcome)
        if welcome.version != VERSION:
            raise StartupError(f"the target is hisparse-pd {welcome.version}, this is {VERSION}")
        plan = Plan(
            cases,
            rounds=config.rounds or (_QUICK_ROUNDS if config.quick else _ROUNDS),
            slow_seconds=_QUICK_SLOW_S if config.quick else _SLOW_S,
            groups=_groups(config, nixl_there=welcome.has_nixl),
        )
        with _Bar(plan) as bar:
            results = Initiator(Workbench(link, config.ib_device, config.transfer_checksum), plan, bar).run()
            overlaps = _overlaps(config, link, plan, bar)
    machines = {"initiator": this_machine()}
    if config.role == "initiator":
        machines["target"] = TypeAdapter(Machine).validate_python(welcome.machine)
    options = {"rounds": plan.rounds, "quick": config.quick, "transfer_checksum": config.transfer_checksum}
    # A target that was started elsewhere cannot be told from other processes.
    others = disturbance.cores() if config.role == "both" else None
    return Report(results, overlaps, machines, options, others)


def _groups(config: TransferBench, nixl_there: bool) -> frozenset[Group]:
    """What was asked for, by default everything that is installed on both sides. Raises StartupError if NIXL is not."""
    has_nixl = nixl_there and nixl_agent.is_installed()
    if Group.NIXL in config.methods and not has_nixl:
        raise StartupError("--methods nixl: NIXL is not installed on both sides; install hisparse-pd[nixl]")
    if config.methods:
        return frozenset(config.methods)
    return frozenset(Group) if has_nixl else frozenset(Group) - {Group.NIXL}


def _overlaps(config: TransferBench, link: wire.Link, plan: Plan, bar: "_Bar") -> list[Overlap]:
    """One for each protocol of the sweep, with the longest prompt that it was measured with.

    None between two machines, which have no common clock to tell a wait by.
    """
    if config.role == "initiator" or not config.overlap:
        return []
    overlaps = []
    for protocol in dict.fromkeys(case.protocol for case in plan.cases):
        bar.overlap(protocol)
        tokens = max(case.tokens for case in plan.cases if case.protocol is protocol)
        overlaps.append(measure_overlap(link, protocol, tokens, config.ib_device, config.transfer_checksum))
    return overlaps


def _publish(config: TransferBench, report: Report) -> None:
    print_report(report, Console())
    write_json(config.json, document(report))
    write_png(config.png, report.results, report.machines["initiator"])
    print(f"written: {config.json}, {config.png}", file=sys.stderr)


def _announce(address: str) -> None:
    print(f"target: waiting at {address}; on the other side:", flush=True)
    print(f"hisparse-pd bench transfer --role initiator --target {address}", flush=True)


@contextmanager
def _target(config: TransferBench) -> Iterator[wire.Link]:
    """A link to the target, of this machine's own making unless one was named. It ends when the link is closed."""
    if config.target is not None:
        link = wire.connect(config.target)
        try:
            yield link
        finally:
            link.close()
        return
    here, there = socket.socketpair()
    with there:
        # In a group of its own: Ctrl-C is for this process, whose end is the target's. But in the same session: Linux
        # divides processors among sessions first (sched_autogroup), so each side would get one of two cores.
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer.target", str(there.fileno()), config.ib_device],
            pass_fds=[there.fileno()],
            process_group=0,
        )
    link = wire.Link(here)
    try:
        yield link
    finally:
        link.close()
        try:
            process.wait(_LET_GO_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Bar:
    """A progress bar: the case that is measured, and how many rounds are done.

    Drawn between runs only: a thread that draws while one is timed takes the interpreter from what is measured.
    """

    def __init__(self, plan: Plan) -> None:
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._progress.add_task("starting", total=plan.num_rounds)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def case(self, case: Case) -> None:
        self._progress.update(self._task, description=str(case), refresh=True)

    def overlap(self, protocol: Protocol) -> None:
        self._progress.update(self._task, description=f"{protocol}: sending while chunks compute", refresh=True)

    def round_done(self) -> None:
        self._progress.update(self._task, advance=1, refresh=True)
