"""What a node of several ranks starts, and how it ends."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import decode_node.process
from base.errors import ProcessFailed, StartupError
from cli import rank_group, serve
from cli.main import main
from cli.rank_group import plan_ranks, run_rank, supervise
from cli.serve import Child
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from ranks import watch
from ranks.barrier import GroupFailed
from ranks.place import RankPlace, create_places
from ranks.status import SharedStatus

PLACES = create_places(3)


def planned(**flags: Any) -> list[Child]:
    return plan_ranks(DecodeConfig(model_path=Path("/m"), ranks=3, **flags), PLACES)


def flag(child: Child, name: str) -> str:
    return child.words[child.words.index(name) + 1]


def test_each_rank_has_ports_and_a_device_of_its_own_and_the_same_flags_otherwise() -> None:
    children = planned(device="cuda:2", gateways=("10.0.0.1:8001", "10.0.0.2:8001"), max_running_requests=7)
    assert [flag(child, "--port") for child in children] == ["8020", "8022", "8024"]
    assert [flag(child, "--control-port") for child in children] == ["8021", "8023", "8025"]
    assert [flag(child, "--device") for child in children] == ["cuda:2", "cuda:3", "cuda:4"]
    for child, place in zip(children, PLACES, strict=True):
        assert flag(child, "--max-running-requests") == "7"
        assert child.words.count("--gateway") == 2
        assert RankPlace.taken(dict(child.secrets)) == place
        assert set(child.descriptors) == {place.status, place.store, *place.wakeup_fds}


def test_ranks_of_a_prefill_node_have_lines_to_the_first_one() -> None:
    places = create_places(3, lines=True)
    children = plan_ranks(PrefillConfig(model_path=Path("/m"), ranks=3, chunked_prefill_size=7), places)
    assert [child.words[0] for child in children] == ["prefill"] * 3
    assert [flag(child, "--control-port") for child in children] == ["8011", "8013", "8015"]
    assert [flag(child, "--chunked-prefill-size") for child in children] == ["7"] * 3
    ends = {end for line in places[0].lines for end in line}
    assert len(ends) == 4
    for child, place in zip(children, places, strict=True):
        assert RankPlace.taken(dict(child.secrets)) == place
        assert ends < set(child.descriptors)
    for descriptor in places[0].descriptors:
        os.close(descriptor)


def test_free_ports_stay_free_ones_and_cpus_are_shared() -> None:
    children = planned(port=0, control_port=0, device="cpu")
    assert [flag(child, name) for child in children for name in ("--port", "--control-port")] == ["0"] * 6
    assert [flag(child, "--device") for child in children] == ["cpu"] * 3


@pytest.mark.parametrize("ports", [(8020, 8024), (65532, 9000)])
def test_ports_that_ranks_would_share_are_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(StartupError, match=f"--port {ports[0]} and --control-port {ports[1]} with --ranks 3"):
        planned(port=ports[0], control_port=ports[1])


def test_local_prefill_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decode", "--model-path", "/m", "--ranks", "2", "--allow-local-prefill"])
    assert ended.value.code == 2
    assert "error: --allow-local-prefill with --ranks 2: only a decode node of one rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--ranks 2 --nnodes 2", "--nnodes 2 without --dist-init-addr: the hosts need HOST:PORT of the one with"),
        ("--node-rank 1", "--node-rank 1 with --nnodes 1: expected 0 to 0"),
        ("--nnodes 2 --node-rank 2 --dist-init-addr 10.0.0.1:5000", "--node-rank 2 with --nnodes 2: expected 0 to 1"),
        ("--ranks 2 --dist-init-addr 10.0.0.1:5000", "--dist-init-addr 10.0.0.1:5000 without --nnodes"),
        ("--ranks 2 --nnodes 2 --dist-init-addr here", "--dist-init-addr here: expected HOST:PORT"),
        ("--ranks 2 --nnodes 2 --dist-init-addr 10.0.0.1:5000", "--dist-init-addr 10.0.0.1: other machines reach it"),
        ("--ranks 3 --nnodes 2 --dist-init-addr 127.0.0.1:5000", "--ranks 3 with --nnodes 2: each host has as many"),
        ("--ranks 1 --nnodes 2 --dist-init-addr 127.0.0.1:5000", "--ranks 1 with --nnodes 2: each host has as many"),
    ],
)
@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_hosts_that_are_not_said_right_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], command: str, words: str, refusal: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--model-path", "/m", *words.split()])
    assert ended.value.code == 2
    assert f"error: {refusal}" in capsys.readouterr().err


def test_the_second_host_has_the_same_ports_and_devices_and_the_ranks_that_follow() -> None:
    places = create_places(4, hosts=2, host=1, meeting="10.0.0.1:5000")
    config = DecodeConfig(
        model_path=Path("/m"), ranks=4, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000", device="cuda"
    )
    children = plan_ranks(config, places)
    assert [child.name for child in children] == ["rank 2", "rank 3"]
    assert [flag(child, "--port") for child in children] == ["8020", "8022"]
    assert [flag(child, "--device") for child in children] == ["cuda:0", "cuda:1"]
    assert [flag(child, "--node-rank") for child in children] == ["1", "1"]
    assert [RankPlace.taken(dict(child.secrets)) for child in children] == places
    for descriptor in places[0].descriptors:
        os.close(descriptor)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, SharedStatus]]]:
    """A function that supervises one rank for each Python program, and returns the exit code and the ranks' table."""
    start = subprocess.Popen

    def run_python(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return start([command[0], *command[3:]], **options)

    monkeypatch.setattr(serve.subprocess, "Popen", run_python)
    monkeypatch.setattr(rank_group.signal, "signal", lambda *_: None)
    tables = []

    def run(
        *programs: str, reports: dict[int, str] | None = None, code: int = 1, first: int = 0, step_timeout: float = 60
    ) -> tuple[int, SharedStatus]:
        table = SharedStatus(SharedStatus.create(first + len(programs)), first + len(programs))
        tables.append(table)
        for rank, text in (reports or {}).items():
            table.report(rank, text, code)
        for rank in range(table.size):
            table.turn(rank)
        children = [Child(f"rank {rank}", ["-c", program], 0) for rank, program in enumerate(programs, first)]
        return supervise(children, table, 30, step_timeout, first), table

    yield run
    for table in tables:
        table.close()


FOR_EVER = "import time; time.sleep(60)"
IGNORE = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]"
STUBBORN = f"{IGNORE}; {FOR_EVER}"


def test_a_killed_rank_ends_the_others_within_three_seconds_and_is_named(
    supervised: Callable[..., tuple[int, SharedStatus]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is killed once the stubborn one ignores signals."""
    ignores, killed = tmp_path / "ignores", tmp_path / "killed"
    stubborn = f"import pathlib; {IGNORE}; pathlib.Path({str(ignores)!r}).touch(); {FOR_EVER}"
    is_killed = f"""
import os, pathlib, time
while not os.path.exists({str(ignores)!r}):
    time.sleep(0.01)
pathlib.Path({str(killed)!r}).write_text(str(time.monotonic()))
os.kill(os.getpid(), 9)
"""
    code, _ = supervised(FOR_EVER, is_killed, stubborn)
    assert code == 1
    assert time.monotonic() - float(killed.read_text()) < 3
    assert capfd.readouterr().err == "error: rank 1 was killed by SIGKILL; all ranks were stopped\n"


def test_a_rank_that_cannot_start_says_why_once(
    supervised: Callable[..., tuple[int, SharedStatus]], capfd: pytest.CaptureFixture[str]
) -> None:
    why = "rank 1: cannot bind the HTTP port 127.0.0.1:8022"
    code, _ = supervised(FOR_EVER, "import sys; sys.exit(2)", reports={1: why}, code=2)
    assert code == 2
    assert capfd.readouterr().err == f"error: {why}; all ranks were stopped\n"


def test_of_several_that_ended_the_one_to_blame_is_named(
    supervised: Callable[..., tuple[int, SharedStatus]], capfd: pytest.CaptureFixture[str]
) -> None:
    both = "import sys; sys.exit(1)"
    reports = {0: "rank 1 ended in step 7", 1: "rank 1 failed in step 7: out of memory"}
    assert supervised(both, both, reports=reports)[0] == 1
    assert capfd.readouterr().err == "error: rank 1 failed in step 7: out of memory; all ranks were stopped\n"


def test_where_another_host_was_lost_its_rank_is_named_with_the_reason(
    supervised: Callable[..., tuple[int, SharedStatus]], capfd: pytest.CaptureFixture[str]
) -> None:
    """And not before the ranks of this host have ended, which may have reasons of their own."""
    lost = "rank 0 on host 0 was not heard for 30 s"
    reports = {0: lost, 1: "rank 0 ended", 2: "rank 0 ended in step 7"}
    assert supervised("import sys; sys.exit(1)", "import sys; sys.exit(1)", reports=reports, first=1)[0] == 1
    assert capfd.readouterr().err == f"error: {lost}; all ranks were stopped\n"
    reports = {0: "rank 0 on host 0 closed its connection", 1: "rank 1: rank 0 has version 1, rank 1 has version 2"}
    assert supervised("import sys; sys.exit(2)", reports=reports, first=1, code=2)[0] == 2
    assert capfd.readouterr().err == f"error: {reports[1]}; all ranks were stopped\n"


def test_a_rank_that_cannot_end_when_another_host_was_lost_is_stopped(
    supervised: Callable[..., tuple[int, SharedStatus]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its loop waits in a collective for a rank of that host."""
    monkeypatch.setattr(rank_group, "_FOLLOW_S", 0.5)
    lost = "rank 0 on host 0 closed its connection"
    assert supervised(FOR_EVER, reports={0: lost}, first=1)[0] == 1
    assert capfd.readouterr().err == f"error: {lost}; all ranks were stopped\n"


def test_a_rank_that_says_that_it_fails_and_cannot_end_is_killed(
    supervised: Callable[..., tuple[int, SharedStatus]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its device may wait for another rank for ever."""
    since = time.monotonic()
    assert supervised(STUBBORN, FOR_EVER, reports={0: "rank 1 did not come to step 7 within 30 s"})[0] == 1
    assert time.monotonic() - since < 4
    assert capfd.readouterr().err == "error: rank 1 did not come to step 7 within 30 s; all ranks were stopped\n"


def test_ranks_that_end_together_in_peace_are_no_failure(
    supervised: Callable[..., tuple[int, SharedStatus]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nearly together: the second ends well within the time that it has to follow."""
    monkeypatch.setattr(rank_group, "_FOLLOW_S", 60.0)
    assert supervised("pass", "import time; time.sleep(0.5)")[0] == 0
    assert capfd.readouterr().err == ""


def test_a_rank_that_stays_when_another_ended_in_peace_is_stopped(
    supervised: Callable[..., tuple[int, SharedStatus]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that was told to stop before it could hear signals: the others wait for it."""
    monkeypatch.setattr(rank_group, "_FOLLOW_S", 0.5)
    assert supervised("import os; os.kill(os.getpid(), 15)", FOR_EVER)[0] == 1
    said = capfd.readouterr().err
    assert said == "error: rank 1 did not end when the others did or were told to; all ranks were stopped\n"


def test_a_rank_that_hangs_while_nobody_waits_for_it_is_ended_and_named(
    supervised: Callable[..., tuple[int, SharedStatus]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped between two steps, say: it does not hear signals. Here it is alone on its host."""
    monkeypatch.setattr(watch, "GRACE_S", 0.25)
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert supervised(stopped, first=1, step_timeout=0.25)[0] == 1
    said = capfd.readouterr().err
    assert said == "error: rank 1 hangs: its loop has not turned for 0.5 s; all ranks were stopped\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StartupError("no such directory"), 2, "rank 1: no such directory"),
        (ProcessFailed("the device failed"), 1, "rank 1: the device failed"),
        (GroupFailed("rank 0 ended"), 1, "rank 0 ended"),
        (RuntimeError("odd"), 1, "rank 1: RuntimeError: odd"),
    ],
)
def test_a_rank_leaves_its_reason_for_who_supervises_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(decode_node.process, "run_decode_node", fail)
    place = create_places(2)[1]
    with pytest.raises((typer.Exit, RuntimeError)) as ended:
        run_rank(DecodeConfig(model_path=Path("/m"), ranks=2), place)
    assert getattr(ended.value, "exit_code", 1) == code
    assert SharedStatus(place.status, 2).reported(1) == (text, code)
