"""What a node of several ranks starts, and how it ends."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import decode_node.process
from base.errors import ProcessFailed, StartupError
from base.version import VERSION
from cli import rank_group, serve
from cli.rank_group import plan_ranks, run_rank, supervise
from cli.serve import Child
from control.codec import PROTOCOL_VERSION
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from ranks import watch
from ranks.barrier import GroupFailed
from ranks.group import SingleRank
from ranks.place import RankPlace, create_places
from ranks.status import SharedStatus
from service.config import NodeConfig
from service.node_model import common_to_ranks
from tests.decode_node.test_process import SPEC

PLACES = create_places(3)
Refused = Callable[..., str]
Supervised = Callable[..., tuple[int, str]]


def planned(**flags: Any) -> list[Child]:
    return plan_ranks(DecodeConfig(model_path=Path("/m"), ranks=3, **flags), PLACES)


def flag(child: Child, name: str) -> str:
    return child.words[child.words.index(name) + 1]


def test_each_rank_has_its_own_ports_and_device_and_the_same_flags() -> None:
    assert [flag(child, "--port") for child in planned(port=0, control_port=0)] == ["0"] * 3
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


@pytest.mark.parametrize("ports", [(8020, 8024), (65532, 9000)])
def test_ports_that_ranks_would_share_are_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(StartupError, match=f"--port {ports[0]} and --control-port {ports[1]} with --ranks 3"):
        planned(port=ports[0], control_port=ports[1])


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
def test_hosts_that_are_not_said_right_are_refused(refused: Refused, command: str, words: str, refusal: str) -> None:
    assert refused(command, "--model-path", "/m", *words.split()).startswith(f"error: {refusal}")


def test_local_prefill_is_refused_by_name(refused: Refused) -> None:
    expected = "error: --allow-local-prefill with --ranks 2: only a decode node of one rank"
    words = ("--model-path", "/m", "--gateway", "g:1", "--ranks", "2", "--allow-local-prefill")
    assert refused("decode", *words).startswith(expected)


def test_the_second_host_has_the_same_ports_and_the_ranks_that_follow() -> None:
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
def supervised(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Supervised:
    """A function that supervises one rank for each Python program, and returns the exit code and what was said."""
    start = subprocess.Popen

    def run_python(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return start([command[0], *command[3:]], **options)

    monkeypatch.setattr(serve.subprocess, "Popen", run_python)
    monkeypatch.setattr(rank_group.signal, "signal", lambda *_: None)
    monkeypatch.setattr(watch, "GRACE_S", 0.25)

    def run(
        *programs: str, reports: dict[int, str] | None = None, code: int = 1, first: int = 0, step_timeout: float = 60
    ) -> tuple[int, str]:
        table = SharedStatus(SharedStatus.create(first + len(programs)), first + len(programs))
        for rank, text in (reports or {}).items():
            table.report(rank, text, code)
        for rank in range(table.size):
            table.turn(rank)
        children = [Child(f"rank {rank}", ["-c", program], 0) for rank, program in enumerate(programs, first)]
        return supervise(children, table, 30, step_timeout, first), capfd.readouterr().err

    return run


FOR_EVER = "import time; time.sleep(60)"
IGNORE = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]"
STUBBORN = f"{IGNORE}; {FOR_EVER}"
FAILS = "import sys; sys.exit(1)"
CANNOT_START = "import sys; sys.exit(2)"
ENDS_IN_PEACE = "import os; os.kill(os.getpid(), 15)"
KILLED = "import os; os.kill(os.getpid(), 9)"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


LOST = "rank 0 on host 0 was not heard for 30 s"
UNBINDABLE = "rank 1: cannot bind the HTTP port 127.0.0.1:8022"
OUT_OF_MEMORY = "rank 1 failed in step 7: out of memory"
OTHER_VERSION = "rank 1: rank 0 has version 1, rank 1 has version 2"


@pytest.mark.parametrize(
    ("programs", "options", "code", "reason"),
    [
        ([FOR_EVER, KILLED, STUBBORN], {}, 1, "rank 1 was killed by SIGKILL"),
        ([FOR_EVER, CANNOT_START], {"reports": {1: UNBINDABLE}, "code": 2}, 2, UNBINDABLE),
        ([FAILS, FAILS], {"reports": {0: "rank 1 ended in step 7", 1: OUT_OF_MEMORY}}, 1, OUT_OF_MEMORY),
        ([FAILS, FAILS], {"reports": {0: LOST, 1: "rank 0 ended", 2: "rank 0 ended in step 7"}, "first": 1}, 1, LOST),
        ([CANNOT_START], {"reports": {0: LOST, 1: OTHER_VERSION}, "first": 1, "code": 2}, 2, OTHER_VERSION),
        ([STOPPED], {"first": 1, "step_timeout": 0.25}, 1, "rank 1 hangs: its loop has not turned for 0.5 s"),
    ],
    ids=[
        "a rank that is killed",
        "a rank that cannot start",
        "the one to blame of several",
        "the rank of another host that was lost",
        "a reason of this host's own where another was lost",
        "a rank that hangs while nobody waits for it",
    ],
)
def test_the_rank_to_blame_is_named_once(
    supervised: Supervised, programs: list[str], options: dict[str, Any], code: int, reason: str
) -> None:
    assert supervised(*programs, **options) == (code, f"error: {reason}; all ranks were stopped\n")


@pytest.mark.parametrize(
    ("programs", "options", "reason"),
    [
        ([FOR_EVER], {"reports": {0: LOST}, "first": 1}, LOST),
        ([ENDS_IN_PEACE, FOR_EVER], {}, "rank 1 did not end when the others did or were told to"),
    ],
    ids=["its loop waits for a rank of a host that was lost", "it was told to stop before it could hear signals"],
)
def test_a_rank_that_does_not_follow_the_others_is_stopped(
    supervised: Supervised,
    monkeypatch: pytest.MonkeyPatch,
    programs: list[str],
    options: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(rank_group, "_FOLLOW_S", 0.5)
    assert supervised(*programs, **options) == (1, f"error: {reason}; all ranks were stopped\n")


def test_a_rank_that_says_that_it_fails_and_cannot_end_is_killed(supervised: Supervised) -> None:
    """Its device may wait for another rank for ever."""
    since = time.monotonic()
    reason = "rank 1 did not come to step 7 within 30 s"
    ended = supervised(STUBBORN, FOR_EVER, reports={0: reason})
    assert time.monotonic() - since < 4
    assert ended == (1, f"error: {reason}; all ranks were stopped\n")


def test_ranks_that_end_nearly_together_are_no_failure(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "_FOLLOW_S", 60.0)
    assert supervised("pass", "import time; time.sleep(0.5)") == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (StartupError("no such directory"), 2, "rank 1: no such directory"),
        (ProcessFailed("the device failed"), 1, "rank 1: the device failed"),
        (GroupFailed("rank 0 ended"), 1, "rank 0 ended"),
        (RuntimeError("odd"), 1, "rank 1: RuntimeError: odd"),
    ],
)
def test_a_rank_leaves_its_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(decode_node.process, "run_decode_node", fail)
    place = create_places(2)[1]
    with pytest.raises((typer.Exit, RuntimeError)) as ended:
        run_rank(DecodeConfig(model_path=Path("/m"), ranks=2), place)
    assert getattr(ended.value, "exit_code", 1) == code
    assert SharedStatus(place.status, 2).reported(1) == (text, code)


@pytest.mark.parametrize("config", [DecodeConfig, PrefillConfig])
def test_ranks_compare_versions_checkpoints_and_what_they_compute_in(config: type[NodeConfig]) -> None:
    compared = common_to_ranks(SingleRank(torch.device("cpu")), config(model_path=Path(), ranks=2), SPEC)
    assert compared["version"] == f"{VERSION} (protocol {PROTOCOL_VERSION})"
    assert compared.keys() >= {"fingerprint", "kv_format", "ranks", "computes_in_fp8"}
