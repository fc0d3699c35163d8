"""A rank that is stopped while no rank waits for it ends its node, as one does that is stopped inside a step."""

import signal

import pytest

from ranks.watch import GRACE_S
from tests.e2e.asking import Job, assert_exact
from tests.e2e.cluster import HOT_BUFFER, all_gone
from tests.e2e.conftest import References, StartCluster
from tests.e2e.test_ranks import PROMPT, ranks_of

pytestmark = pytest.mark.slow

STEP_TIMEOUT_S = 2


@pytest.mark.parametrize(
    ("role", "rank"),
    [("prefill", 0), ("prefill", 1), ("decode", 1)],
    ids=["first-of-prefill", "follower-of-prefill", "of-decode"],
)
def test_a_rank_that_is_stopped_in_peace_ends_its_node_which_starts_again(
    start_cluster: StartCluster, references: References, role: str, rank: int
) -> None:
    cluster = start_cluster()
    flags: dict[str, dict[str, object]] = {"prefill": {}, "decode": {"hisparse_config": HOT_BUFFER}}
    flags[role] |= {"ranks": 2, "step_timeout": STEP_TIMEOUT_S}
    nodes = {"prefill": cluster.prefill(**flags["prefill"]), "decode": cluster.decode(**flags["decode"])}

    def serves() -> None:
        cluster.wait_ready(decode=2 if role == "decode" else 1, prefill=1)
        assert_exact(cluster.url, references["deepseek_v32"], [Job(PROMPT, 8)])

    serves()
    nodes["prefill"].wait_unused("prefill_pages")
    group = nodes[role]
    processes = ranks_of(group)
    processes[rank].send_signal(signal.SIGSTOP)
    assert group.process.wait(timeout=60) == 1
    assert all_gone(processes)
    last = group.log.splitlines()[-1]
    patience = STEP_TIMEOUT_S + GRACE_S
    assert last == f"error: rank {rank} hangs: its loop has not turned for {patience:g} s; all ranks were stopped"
    cluster.restart(group)
    serves()
