"""A decode node of several ranks says what transformers says, and ends whole when one of its ranks ends."""

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import psutil
import pytest

from tests.e2e.asking import Job, ask, assert_exact, complete, ids_of, random_prompts
from tests.e2e.cluster import HOT_BUFFER, Cluster, Node, all_gone, wait_until
from tests.e2e.conftest import FAMILIES, Reference, References, StartCluster

LENGTHS = (300, 17, 150, 64, 1, 500, 2, 200, 130, 400, 65, 257)
JOBS = [
    Job(prompt, 20 + 8 * (number % 3), abort_after=5 if number % 5 == 4 else None)
    for number, prompt in enumerate(random_prompts(LENGTHS, seed=5))
]
ROUNDS = ((1, JOBS[:2]), (3, JOBS), (12, JOBS))
"""One rank has a request and the others are idle; some have more than others; all have several. Requests come and end
at different steps, and clients leave."""
NOTICED_S = 3.0
"""How long a group may take to end once a rank's end was noticed."""
PROMPT = [7, 3, 9, 200, 41] * 60
Disturb = Callable[[Sequence[psutil.Process]], None]
_PIDFD_GETFD = 438
"""The number of the system call, for which Python has no function."""


def configurations() -> list[Any]:
    """Ranks and family; all but one are slow."""
    return [
        pytest.param(*case, marks=pytest.mark.slow if number else ())
        for number, case in enumerate(product((2, 4), FAMILIES))
    ]


def ranks_of(node: Node) -> list[psutil.Process]:
    """The processes of its ranks, in order."""

    def port(process: psutil.Process) -> int:
        words = " ".join(process.cmdline()).split()
        return int(words[words.index("--port") + 1])

    return sorted(psutil.Process(node.process.pid).children(), key=port)


def assert_ranks_exact(
    cluster: Cluster, decode: Node, reference: Reference, ranks: int, rounds: Sequence[tuple[int, Sequence[Job]]]
) -> None:
    """The node's ranks serve these jobs, so many at a time in each round, as the reference does, and then drain."""
    cluster.wait_ready(decode=ranks)
    for concurrency, jobs in rounds:
        assert_exact(cluster.url, reference, jobs, concurrency)
    for rank in range(ranks):
        assert decode.metric("swap_in_misses_total", rank) > 0, f"rank {rank} had no long request"
        decode.wait_unused("host_slots", rank)
    decode.signal(signal.SIGTERM)
    assert decode.process.wait(timeout=60) == 0, decode.log[-3000:]
    assert "violations" not in decode.log


@pytest.mark.parametrize(("ranks", "family"), configurations())
def test_every_rank_is_exact(start_cluster: StartCluster, references: References, ranks: int, family: str) -> None:
    cluster = start_cluster(family)
    cluster.prefill(chunked_prefill_size=333, transfer_checksum="full")
    decode = cluster.decode(ranks=ranks, hisparse_config=HOT_BUFFER, debug_verify_swap_in=True)
    assert_ranks_exact(cluster, decode, references[family], ranks, ROUNDS)


@pytest.mark.slow
def test_ranks_sleep_without_work_and_drain_if_one_does(start_cluster: StartCluster, references: References) -> None:
    cluster = start_cluster()
    cluster.prefill()
    decode = cluster.decode(ranks=2, hisparse_config=HOT_BUFFER)
    cluster.wait_ready(decode=2)
    processes = ranks_of(decode)
    assert complete(cluster.url, [Job(PROMPT, 8)]) == [references["deepseek_v32"].generate(PROMPT, 8)]
    wait_until(lambda: not any(decode.metric("requests", rank, state="running") for rank in range(2)))
    before, since = [sum(process.cpu_times()[:2]) for process in processes], time.monotonic()
    time.sleep(5)
    used = [sum(process.cpu_times()[:2]) - spent for process, spent in zip(processes, before, strict=True)]
    print("cores of idle ranks:", [f"{100 * seconds / (time.monotonic() - since):.1f}%" for seconds in used])
    assert max(used) / (time.monotonic() - since) < 0.05
    tokens = [decode.metric("generated_tokens_total", rank) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(PROMPT, 100)])
        # A draining node hands back what has streamed nothing yet, and no other node is there.
        busy = wait_until(
            lambda: [rank for rank in range(2) if decode.metric("generated_tokens_total", rank) > tokens[rank]],
            what="a token",
        )
        [idle] = {0, 1} - set(busy)
        processes[idle].terminate()
        assert answer.result() == [references["deepseek_v32"].generate(PROMPT, 100)]
    assert decode.process.wait(timeout=30) == 0


def kill(ranks: Sequence[psutil.Process]) -> None:
    ranks[1].kill()


def stop(ranks: Sequence[psutil.Process]) -> None:
    ranks[1].suspend()


def break_collectives(ranks: Sequence[psutil.Process]) -> None:
    """Shut down the connections between two ranks: they talk to each other in collectives only."""
    first, second = ({(c.laddr, c.raddr): c.fd for c in rank.net_connections("tcp") if c.raddr} for rank in ranks)
    shared = [descriptor for (here, there), descriptor in first.items() if (there, here) in second]
    assert shared
    process = os.pidfd_open(ranks[0].pid)
    for descriptor in shared:
        number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        assert number >= 0, os.strerror(ctypes.get_errno())
        with socket.socket(fileno=number) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    os.close(process)


def assert_disturbed_ends(group: Node, disturb: Disturb, reason: str) -> None:
    """Disturb the ranks of a node: it ends in time, whole, and says why."""
    processes = ranks_of(group)
    disturb(processes)
    since = time.monotonic()
    assert group.process.wait(timeout=30) == 1
    limit = NOTICED_S + (2 if disturb in (stop, break_collectives) else 0)
    assert time.monotonic() - since < limit + 1, "on a busy machine"
    assert all_gone(processes)
    last = group.log.splitlines()[-1]
    assert re.match(f"error: {reason}", last)
    assert last.endswith("; all ranks were stopped")


@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        (kill, "rank 1 was killed by SIGKILL"),
        pytest.param(stop, "rank 1 ", marks=pytest.mark.slow),
        pytest.param(break_collectives, r"rank \d failed in step \d+: ", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped", "broken-collective"],
)
def test_a_group_that_loses_a_rank_ends_and_another_node_takes_over(
    start_cluster: StartCluster, references: References, disturb: Disturb, reason: str
) -> None:
    cluster = start_cluster()
    cluster.prefill()
    group = cluster.decode("group", ranks=2, hisparse_config=HOT_BUFFER, step_timeout=2)
    cluster.decode("other", hisparse_config=HOT_BUFFER)
    cluster.wait_ready(decode=3)
    expected = references["deepseek_v32"].generate(PROMPT, 200)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, cluster.url, PROMPT, 200) for _ in range(6)]
        wait_until(lambda: all(group.metric("requests", rank, state="running") >= 1 for rank in range(2)))
        assert_disturbed_ends(group, disturb, reason)
        assert [ids_of(answer.result()) for answer in answers] == [expected] * 6


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.prefill()
    decode = cluster.decode(ranks=2)
    cluster.wait_ready(decode=2)
    ranks = ranks_of(decode)
    decode.kill()
    wait_until(lambda: all_gone(ranks), NOTICED_S, "the ranks to be gone")
