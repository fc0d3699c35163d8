"""`hisparse-pd bench transfer`: who plays which role, and what becomes of the figures."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import Machine, this_machine
from benchmarks.plotting import check_installed
from benchmarks.transfer import nixl_agent, wire
from benchmarks.transfer.cases import Case, Sweep
from benchmarks.transfer.initiator import Initiator, Plan
from benchmarks.transfer.plot import write_png
from benchmarks.transfer.report import document, table, write_json
from benchmarks.transfer.target import listen
from benchmarks.transfer.workbench import Workbench
from service.errors import StartupError
from service.logs import configure_logging
from transfer.checksum import ChecksumMode

Role = Literal["both", "target", "initiator"]

_QUICK_ROUNDS = 5
_ROUNDS = 15
_LET_GO_S = 5.0
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """Each field is the flag of the same name. `target` is where an initiator finds its target."""

    role: Role = "both"
    target: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    sweep: Sweep = field(default_factory=Sweep)
    rounds: int | None = None
    quick: bool = False
    nixl: bool = True
    ib_device: str = ""
    transfer_checksum: ChecksumMode = "sample"
    json: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Raises StartupError for options that contradict each other."""
        if self.role == "initiator" and self.target is None:
            raise StartupError("--role initiator needs --target HOST:PORT, as `--role target` prints it")
        if self.role != "initiator" and self.target is not None:
            raise StartupError(f"--target is for --role initiator, not for --role {self.role}")
        if self.png is not None and self.role != "target":
            check_installed()


def run_transfer_bench(config: TransferBench) -> None:
    """Measure and report, or be the target until the initiator goes.

    Raises StartupError for what cannot be started, MethodFailed for a method that fails or leaves wrong bytes.
    """
    config.check()
    configure_logging("warning", "text", f"bench {config.role}")
    if config.role == "target":
        listen(config.host, config.port, config.ib_device, announce=_announce)
        return
    cases = config.sweep.cases(config.quick)
    console = Console(stderr=True)
    with _target(config) as link:
        welcome = link.ask(wire.Hello(version=version("hisparse-pd")), wire.Welcome)
        if welcome.version != version("hisparse-pd"):
            raise StartupError(f"the target is hisparse-pd {welcome.version}, this is {version('hisparse-pd')}")
        plan = Plan(
            cases,
            rounds=config.rounds or (_QUICK_ROUNDS if config.quick else _ROUNDS),
            with_nixl=config.nixl and welcome.has_nixl and nixl_agent.is_installed(),
        )
        with _Bar(console, plan) as bar:
            results = Initiator(Workbench(link, config.ib_device, config.transfer_checksum), plan, bar).run()
        machines = {"initiator": this_machine(), "target": TypeAdapter(Machine).validate_python(welcome.machine)}
    out = Console()
    # A table that goes to a file is not squeezed into the width of a terminal that is not there.
    out = out if out.is_terminal else Console(width=_WIDTH)
    for result in results:
        out.print(table(result), "")
    out.print("* the ceiling: what the others are a part of. Of each method's bytes, every one was compared.")
    out.print(f"{machines['initiator']}", highlight=False)
    if config.role == "initiator":
        out.print(f"target: {machines['target']}", highlight=False)
    if config.json is not None:
        options = {"rounds": plan.rounds, "quick": config.quick, "transfer_checksum": config.transfer_checksum}
        write_json(config.json, document(results, machines, options))
    if config.png is not None:
        write_png(config.png, results, machines["initiator"])
    if written := [str(path) for path in (config.json, config.png) if path is not None]:
        console.print(f"written: {', '.join(written)}", highlight=False)


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
        # In a session of its own: Ctrl-C is for this process, whose end is the target's.
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer.target", str(there.fileno()), config.ib_device],
            pass_fds=[there.fileno()],
            start_new_session=True,
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
    """A progress bar: the case that is measured, and how many rounds are done."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
        )
        self._task = self._progress.add_task("starting", total=plan.num_rounds)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def case(self, case: Case) -> None:
        self._progress.update(self._task, description=str(case))

    def round_done(self) -> None:
        self._progress.advance(self._task)
