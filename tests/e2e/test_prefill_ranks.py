"""A prefill node of several ranks says what one says, is one node to everybody else, and ends whole."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Job, complete, wait_until
from tests.e2e.conftest import FAMILIES, Reference
from tests.e2e.test_parity import prompts
from tests.e2e.test_ranks import HOT_BUFFER

CHUNK = 97
"""Tokens of a step; ranks do not divide it. There are prompts of several steps, and steps of several prompts."""
LENGTHS = (300, 2, 150, 64, 1, 500, 3, 200, 130, 98, 65, 257)
JOBS = [
    Job(prompt, 12, abort_after=0 if number % 5 == 4 else None)
    for number, prompt in enumerate(prompts(LENGTHS, seed=6))
]
ROUNDS = ((1, JOBS[:2]), (12, JOBS))


def configurations() -> list[Any]:
    """Prefill ranks, decode ranks and family; all but one are slow."""
    return [
        pytest.param(*case, marks=pytest.mark.slow if number else ())
        for number, case in enumerate(product((2, 4), (1, 2), FAMILIES))
    ]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks", "family"), configurations())
def test_the_tokens_behind_a_prefill_node_of_several_ranks_equal_transformers(
    start_cluster: Callable[..., Cluster],
    references: dict[str, Reference],
    prefill_ranks: int,
    decode_ranks: int,
    family: str,
) -> None:
    cluster = start_cluster(family)
    prefill = cluster.prefill(ranks=prefill_ranks, chunked_prefill_size=CHUNK, transfer_checksum="full")
    decode = cluster.decode(ranks=decode_ranks, hisparse_config=HOT_BUFFER, debug_verify_swap_in=True)
    wait_ready(cluster, decode_ranks)
    assert_exact(cluster.url, references[family])
    for rank in range(decode_ranks):
        wait_until(lambda: not decode.metric("host_slots", rank, state="used"))  # noqa: B023
    wait_until(lambda: not prefill.metric("prefill_pages", state="used"))
    prefill.signal(15)
    assert prefill.process.wait(timeout=60) == 0


def wait_ready(cluster: Cluster, decode_nodes: int = 1, prefill_nodes: int = 1) -> None:
    """All processes are ready, and the gateway knows so many nodes."""
    cluster.wait_ready(timeout=120)
    gateway = cluster.nodes["gateway"]
    for role, number in (("decode", decode_nodes), ("prefill", prefill_nodes)):
        wait_until(lambda: gateway.metric("nodes", role=role) == number, 60, f"{number} {role} nodes")  # noqa: B023


def assert_exact(url: str, reference: Reference, rounds: Sequence[tuple[int, Sequence[Job]]] = ROUNDS) -> None:
    for concurrency, jobs in rounds:
        for job, answer in zip(jobs, complete(url, jobs, concurrency), strict=True):
            if job.abort_after is None:
                assert answer == reference.generate(list(job.prompt_ids), job.max_tokens), len(job.prompt_ids)
