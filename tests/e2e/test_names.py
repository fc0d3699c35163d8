"""Names and addresses behind them, as in Kubernetes: replicas share a name, and a pod keeps its own when it moves."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.serve import free_port
from tests.e2e.asking import Job, complete
from tests.e2e.cluster import HOT_BUFFER, Cluster, Place, wait_until
from tests.e2e.conftest import References
from tests.e2e.hosts import HostsFile
from tests.e2e.spawn import fork
from tests.skips import impossible

PROMPT = [7, 3, 9, 200, 41] * 40
_UNSHARE = ("unshare", "--mount", "--propagation", "private")


class Hosts:
    """The hosts file of a cluster's processes, mounted over /etc/hosts for them alone, and where they run.

    `at` has the addresses of those processes that are not at 127.0.0.1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at: dict[str, str] = {}
        self.say()

    def say(self, **addresses: list[str]) -> None:
        """Which addresses each name has from now on."""
        lines = ["127.0.0.1 localhost", *(f"{each} {name}" for name, all_ in addresses.items() for each in all_)]
        self.path.write_text("\n".join([*lines, ""]))

    def place(self, name: str) -> Place:
        return Place(self.at.get(name, "127.0.0.1"), HostsFile(self.path))


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    trial = subprocess.run([*_UNSHARE, "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True, text=True)
    if trial.returncode != 0:
        needs = "needs root, to mount a hosts file"
        pytest.skip(needs if os.geteuid() else impossible(trial.stderr.strip()))
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def cluster(checkpoints: dict[str, Path], tmp_path: Path, hosts: Hosts) -> Iterator[Cluster]:
    with Cluster(checkpoints["deepseek_v32"], tmp_path, places=hosts.place, spawn=fork) as cluster:
        yield cluster


def test_nodes_serve_gateways_of_a_name_also_later_ones(cluster: Cluster, hosts: Hosts, references: References) -> None:
    port = free_port()
    expected = references["deepseek_v32"].generate(PROMPT, 8)
    hosts.at = {"first": "127.0.0.2", "second": "127.0.0.3", "third": "127.0.0.4"}
    hosts.say(gateways=["127.0.0.2", "127.0.0.3"])
    first = cluster.gateway("first", control_port=port, served_model_name="tiny")
    second = cluster.gateway("second", control_port=port, served_model_name="tiny")
    cluster.prefill(gateway=f"gateways:{port}")
    cluster.decode(gateway=f"gateways:{port}")
    cluster.wait_ready()
    assert complete(first.base_url, [Job(PROMPT, 8)]) == [expected]
    assert complete(second.base_url, [Job(PROMPT, 8)]) == [expected]

    first.kill()
    third = cluster.gateway("third", control_port=port, served_model_name="tiny")
    hosts.say(gateways=["127.0.0.3", "127.0.0.4"])
    wait_until(third.is_up, what="the nodes to find the gateway that came later")
    assert complete(third.base_url, [Job(PROMPT, 8)]) == [expected]
    assert complete(second.base_url, [Job(PROMPT, 8)]) == [expected]


def test_a_node_that_comes_back_by_name_ends_quarantine(cluster: Cluster, hosts: Hosts, references: References) -> None:
    """A pod of a StatefulSet that was rescheduled. Its name proves that the process before it has ended."""
    expected = references["deepseek_v32"].generate(PROMPT, 8)
    hosts.at = {"prefill": "127.0.0.2", "decode": "127.0.0.3"}
    hosts.say(prefill=["127.0.0.2"], decode=["127.0.0.3"])
    cluster.gateway(served_model_name="tiny")
    prefill = cluster.prefill(advertise_host="prefill")
    decode = cluster.decode(advertise_host="decode", hisparse_config=HOT_BUFFER)
    cluster.wait_ready()
    prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(PROMPT, 8)])
        wait_until(lambda: decode.metric("requests", state="prefilling") == 1, what="the prefill to be dispatched")
        prefill.kill()
        wait_until(lambda: decode.metric("host_slots", state="quarantined") > 0, what="its slots to be quarantined")

        hosts.at["prefill"] = "127.0.0.4"
        hosts.say(prefill=["127.0.0.4"], decode=["127.0.0.3"])
        cluster.restart(prefill)
        # Its only prefill node is gone, so it is refused unless the node is back before that is noticed.
        refusal = answer.exception()
        assert answer.result() == [expected] if refusal is None else "prefill node" in str(refusal)
    wait_until(lambda: decode.metric("host_slots", state="quarantined") == 0, what="quarantine to end")
    cluster.wait_ready()
    assert complete(cluster.url, [Job(PROMPT, 8)]) == [expected]
