"""A prefill node of several ranks says what one says, is one node to everybody else, and ends whole."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import psutil
import pytest

from cli.rank_group import plan_ranks
from cli.serve import RANK_PORTS, free_port
from prefill_node.config import PrefillConfig
from ranks.place import create_places
from ranks.status import SharedStatus
from tests.e2e.asking import Job, ask, assert_exact, greedy, ids_of, leave_when, random_prompts
from tests.e2e.cluster import HOT_BUFFER, START_TIMEOUT_S, all_gone, children_of, metric_value, wait_until
from tests.e2e.conftest import FAMILIES, Reference, References, Serve, StartCluster
from tests.e2e.test_ranks import Disturb, assert_disturbed_ends, break_collectives, kill, stop

CHUNK = 97
"""Tokens of a step; ranks do not divide it. There are prompts of several steps, and steps of several prompts."""
LENGTHS = (300, 2, 150, 64, 1, 500, 3, 200, 130, 98, 65, 257)
JOBS = [
    Job(prompt, 12 + 8 * (number % 3), abort_after={4: 0, 7: 5}.get(number % 10))
    for number, prompt in enumerate(random_prompts(LENGTHS, seed=6))
]
"""One client leaves before its first token, and one behind its fifth."""
SHORT = ((6, JOBS[:6]),)
ROUNDS = ((1, JOBS[:2]), (3, JOBS), (12, JOBS))
"""As in test_ranks.py: decode ranks are idle, join late, and have more or fewer requests than others."""
[LONG] = random_prompts((1200,), seed=7)
NEW_TOKENS = 8
BODY = greedy(LONG, NEW_TOKENS)
"""Of a request whose prompt takes a group with small chunks some hundreds of steps."""


def configurations() -> list[Any]:
    """Prefill ranks, decode ranks, family, and what is asked; all but one are slow.

    test_ranks.py has those of one prefill rank.
    """
    return [
        pytest.param(*case, ROUNDS if number else SHORT, marks=pytest.mark.slow if number else ())
        for number, case in enumerate(product((2, 4), (1, 2, 4), FAMILIES))
    ]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks", "family", "rounds"), configurations())
def test_the_tokens_behind_several_prefill_ranks_equal_transformers(
    start_cluster: StartCluster,
    references: References,
    prefill_ranks: int,
    decode_ranks: int,
    family: str,
    rounds: Sequence[tuple[int, Sequence[Job]]],
) -> None:
    cluster = start_cluster(family)
    prefill = cluster.prefill(ranks=prefill_ranks, chunked_prefill_size=CHUNK, transfer_checksum="full")
    decode = cluster.decode(ranks=decode_ranks, hisparse_config=HOT_BUFFER, debug_verify_swap_in=True)
    cluster.wait_ready(decode=decode_ranks, prefill=1)
    assert_rounds(cluster.url, references[family], rounds)
    for rank in range(decode_ranks):
        decode.wait_unused("host_slots", rank)
    prefill.wait_unused("prefill_pages")
    prefill.signal(signal.SIGTERM)
    assert prefill.process.wait(timeout=60) == 0


def kill_first(ranks: Sequence[psutil.Process]) -> None:
    ranks[0].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        (kill, "rank 1 was killed by SIGKILL"),
        (kill_first, "rank 0 was killed by SIGKILL"),
        (stop, "rank 1 "),
        (break_collectives, r"rank \d failed in step \d+: "),
    ],
    ids=["killed", "first-killed", "stopped", "broken-collective"],
)
def test_slots_of_a_group_that_lost_a_rank_wait_for_every_ranks_end(
    start_cluster: StartCluster, references: References, disturb: Disturb, reason: str
) -> None:
    """Before that, a client leaves in the middle of a prompt, which costs nothing."""
    cluster = start_cluster()
    group = cluster.prefill("group", ranks=2, chunked_prefill_size=4, step_timeout=2)
    decode = cluster.decode(hisparse_config=HOT_BUFFER)
    cluster.wait_ready(decode=1, prefill=1)
    leave_when(lambda: group.metric("prompt_tokens_total"), cluster.url, BODY)
    decode.wait_unused("host_slots")
    wait_until(lambda: not decode.metric("host_slots", state="quarantined"), what="Quiesced of all ranks")
    group.wait_unused("prefill_pages")
    assert 0 < group.metric("prompt_tokens_total") < len(LONG) - 1

    expected = references["deepseek_v32"].generate(LONG, NEW_TOKENS)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, cluster.url, LONG, NEW_TOKENS)
        wait_until(lambda: group.metric("requests", state="computing"))
        assert_disturbed_ends(group, disturb, reason)
        cluster.prefill("other")
        assert ids_of(answer.result()) == expected
    if disturb is not break_collectives:
        assert decode.metric("host_slots", state="quarantined") == len(LONG) - 1, "what has a dead rank sent?"
    cluster.restart(group)
    wait_until(lambda: not decode.metric("host_slots", state="quarantined"), 60, "proof of every rank's death")
    cluster.wait_ready(decode=1, prefill=2)


@pytest.mark.slow
def test_a_group_does_not_start_while_an_orphan_may_write(start_cluster: StartCluster, references: References) -> None:
    cluster = start_cluster()
    decode = cluster.decode(hisparse_config=HOT_BUFFER)
    port, control_port = free_port(ranks=2), free_port(ranks=2)
    places = create_places(2, lines=True)
    config = PrefillConfig(
        model_path=cluster.model_path,
        ranks=2,
        port=port,
        control_port=control_port,
        dtype="float32",
        transfer_protocol="tcp",
        chunked_prefill_size=4,
        gateways=(cluster.nodes["gateway"].control_address,),
    )
    # Not by a process that takes them along when it ends.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "cli.main", *child.words],
            env={**os.environ, **child.secrets},
            pass_fds=child.descriptors,
            # Linux shares processors between sessions: in that of the tests, it would start slowly.
            start_new_session=True,
        )
        for child in plan_ranks(config, places)
    ]
    try:
        cluster.wait_ready(decode=1, prefill=1)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, cluster.url, LONG, NEW_TOKENS)
            wait_until(lambda: metric_of(port, "prompt_tokens_total"), what="the first step")
            ranks[1].send_signal(signal.SIGSTOP)
            ranks[0].kill()
            refused = cluster.prefill("refused", ranks=2, control_port=control_port)
            assert refused.process.wait(timeout=START_TIMEOUT_S) == 2
            del cluster.nodes["refused"]
            assert refused.log.splitlines()[-1].startswith(
                f"error: rank 1: cannot bind the control port 127.0.0.1:{control_port + RANK_PORTS}"
            )
            assert decode.metric("host_slots", state="quarantined") == len(LONG) - 1
            # No other node could compute its prompt.
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                answer.result()
            ranks[1].send_signal(signal.SIGCONT)
            assert ranks[1].wait(timeout=10) == 1, "it sees that rank 0 has ended"
            cluster.prefill("again", ranks=2, control_port=control_port)
            cluster.wait_ready(decode=1, prefill=1)
            assert ids_of(ask(cluster.url, LONG, NEW_TOKENS)) == references["deepseek_v32"].generate(LONG, NEW_TOKENS)
        wait_until(lambda: not decode.metric("host_slots", state="quarantined"), 60, "proof of every rank's death")
    finally:
        # Nobody else says why a rank ended.
        status = SharedStatus(places[0].status, len(ranks))
        print(*((process.poll(), status.reported(rank)) for rank, process in enumerate(ranks)), sep="\n")
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_serve_runs_prefill_nodes_of_several_ranks(serve: Serve, references: References) -> None:
    process, url = serve("--prefill-ranks", "2", "--decode-ranks", "2", "--transfer-protocol", "auto")
    children = children_of(process)
    assert len(children) == 7
    assert_rounds(url, references["deepseek_v32"], SHORT)
    process.terminate()
    assert process.wait(timeout=60) == 0
    wait_until(lambda: all_gone(children), what="the processes to be gone")


def metric_of(port: int, name: str) -> float:
    """A metric of a process that the cluster did not start."""
    return metric_value(httpx.get(f"http://127.0.0.1:{port}/metrics").text, f"hisparse_pd_{name}", {})


def assert_rounds(url: str, reference: Reference, rounds: Sequence[tuple[int, Sequence[Job]]] = ROUNDS) -> None:
    for concurrency, jobs in rounds:
        assert_exact(url, reference, jobs, concurrency)
