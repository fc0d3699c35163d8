"""Groups of two hosts: a prefill and a decode node with a rank on each, over a network that can be cut."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.serve import free_port
from control.keys import generate
from ranks.watch import GRACE_S
from tests.e2e.asking import Job, assert_exact
from tests.e2e.cluster import HOT_BUFFER, Cluster, Node, Place, wait_until
from tests.e2e.conftest import References
from tests.e2e.hosts import Network, why_not
from tests.e2e.spawn import fork, start_fork_server
from tests.e2e.test_ranks import JOBS, ranks_of

WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""), pytest.mark.slow]

HOSTS = ("host-0", "host-1")
STEP_TIMEOUT_S = 10
FLAGS: dict[str, dict[str, object]] = {
    "prefill": {"chunked_prefill_size": 97, "transfer_checksum": "full"},
    "decode": {"hisparse_config": HOT_BUFFER, "debug_verify_swap_in": True},
}


class Groups:
    """A gateway on a host of its own, and a prefill and a decode group on two others."""

    def __init__(self, network: Network, model_path: Path, directory: Path) -> None:
        self.network = network
        self.keys = directory / "keys"
        generate(self.keys)
        self.cluster = Cluster(model_path, directory, places=self._place, spawn=fork)
        for name in ("gateway", "client", *HOSTS):
            network.host(name)

    def start(self) -> None:
        self.cluster.gateway(served_model_name="tiny", key_dir=self.keys, insecure=True)
        for role, start in (("prefill", self.cluster.prefill), ("decode", self.cluster.decode)):
            first = self.network.hosts[HOSTS[0]].addresses["data"]
            group = {"ranks": 2, "nnodes": 2, "dist_init_addr": f"{first}:{free_port()}", "key_dir": self.keys}
            for number, host in enumerate(HOSTS):
                start(f"{role}@{host}", node_rank=number, step_timeout=STEP_TIMEOUT_S, **group, **FLAGS[role])
        self.cluster.wait_ready(timeout=150, decode=2)

    def node(self, role: str, number: int) -> Node:
        return self.cluster.nodes[f"{role}@{HOSTS[number]}"]

    def _place(self, name: str) -> Place:
        host = self.network.hosts[name.rpartition("@")[2]]
        return Place(host.addresses["data"], host.inside)


@pytest.fixture
def groups(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Groups]:
    start_fork_server()  # on the machine: the client's host ends with these tests
    with Network("data") as network:
        made = Groups(network, checkpoints["deepseek_v32"], tmp_path)
        with network.hosts["client"].entered(), made.cluster:
            made.start()
            yield made


def test_tokens_equal_transformers_and_a_lost_host_ends_its_group(groups: Groups, references: References) -> None:
    cluster, reference = groups.cluster, references["deepseek_v32"]
    for concurrency, jobs in ((1, JOBS[:2]), (12, JOBS)):
        assert_exact(cluster.url, reference, jobs, concurrency)
    for number in range(2):
        decode = groups.node("decode", number)
        assert decode.metric("swap_in_misses_total") > 0, "each rank had long requests"
        wait_until(lambda: decode.metric("host_slots", state="used") == 0)  # noqa: B023

    groups.network.part(*(groups.network.hosts[name] for name in HOSTS))
    for role in ("prefill", "decode"):
        for number in range(2):
            node = groups.node(role, number)
            assert node.process.wait(timeout=6 * STEP_TIMEOUT_S) == 1
            last = node.log.splitlines()[-1]
            assert last == (
                f"error: rank {1 - number} on host {1 - number} was not heard for {STEP_TIMEOUT_S} s; "
                "all ranks were stopped"
            )
    groups.network.join(*(groups.network.hosts[name] for name in HOSTS))
    for role in ("prefill", "decode"):
        for number in range(2):
            cluster.restart(groups.node(role, number))
    cluster.wait_ready(timeout=150, decode=2)
    assert_exact(cluster.url, reference, [Job(JOBS[0].prompt_ids, 8)])
    groups.node("decode", 1).process.send_signal(signal.SIGTERM)
    assert [groups.node("decode", number).process.wait(timeout=60) for number in range(2)] == [0, 0]

    # Nobody on its host waits for this rank, or is there but the process that started it.
    [stopped] = ranks_of(groups.node("prefill", 1))
    stopped.send_signal(signal.SIGSTOP)
    reasons = (
        f"rank 1 on host 1 was not heard for {STEP_TIMEOUT_S} s",
        f"rank 1 hangs: its loop has not turned for {STEP_TIMEOUT_S + GRACE_S:g} s",
    )
    for number, reason in enumerate(reasons):
        node = groups.node("prefill", number)
        assert node.process.wait(timeout=6 * STEP_TIMEOUT_S) == 1
        assert node.log.splitlines()[-1] == f"error: {reason}; all ranks were stopped"
