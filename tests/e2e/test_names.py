"""Names and addresses behind them, as in Kubernetes: replicas share a name, and a pod keeps its own when it moves."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.serve import free_port
from tests.e2e import own_hosts
from tests.e2e.cluster import Cluster, Job, complete, wait_until
from tests.e2e.conftest import Reference

PROMPT = [7, 3, 9, 200, 41] * 40


class Hosts:
    """The hosts file of a cluster's processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.say()

    def say(self, **addresses: list[str]) -> None:
        """Which addresses each name has from now on."""
        lines = ["127.0.0.1 localhost", *(f"{each} {name}" for name, all_ in addresses.items() for each in all_)]
        self.path.write_text("\n".join([*lines, ""]))


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    if not own_hosts.possible():
        pytest.skip("needs root, to mount a hosts file")
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def cluster(checkpoints: dict[str, Path], tmp_path: Path, hosts: Hosts) -> Iterator[Cluster]:
    environment = own_hosts.environment(hosts.path)
    with Cluster(checkpoints["deepseek_v32"], tmp_path, own_hosts.MODULE, lambda _: environment) as cluster:
        yield cluster


def test_nodes_serve_every_gateway_behind_a_name_also_one_that_comes_later(
    cluster: Cluster, hosts: Hosts, references: dict[str, Reference]
) -> None:
    control_port = free_port()
    expected = references["deepseek_v32"].generate(PROMPT, 8)
    hosts.say(gateways=["127.0.0.2", "127.0.0.3"])
    first = cluster.gateway("first", host="127.0.0.2", control_port=control_port, served_model_name="tiny")
    second = cluster.gateway("second", host="127.0.0.3", control_port=control_port, served_model_name="tiny")
    cluster.prefill(gateway=f"gateways:{control_port}")
    cluster.decode(gateway=f"gateways:{control_port}")
    cluster.wait_ready()
    assert complete(first.base_url, [Job(PROMPT, 8)]) == [expected]
    assert complete(second.base_url, [Job(PROMPT, 8)]) == [expected]

    first.kill()
    third = cluster.gateway("third", host="127.0.0.4", control_port=control_port, served_model_name="tiny")
    hosts.say(gateways=["127.0.0.3", "127.0.0.4"])
    wait_until(third.is_up, what="the nodes to find the gateway that came later")
    assert complete(third.base_url, [Job(PROMPT, 8)]) == [expected]
    assert complete(second.base_url, [Job(PROMPT, 8)]) == [expected]


def test_a_prefill_node_that_comes_back_at_another_address_under_its_name_ends_the_quarantine(
    cluster: Cluster, hosts: Hosts, references: dict[str, Reference]
) -> None:
    """A pod of a StatefulSet that was rescheduled. Its name proves that the process before it has ended."""
    expected = references["deepseek_v32"].generate(PROMPT, 8)
    hosts.say(prefill=["127.0.0.2"], decode=["127.0.0.3"])
    gateway = cluster.gateway(served_model_name="tiny")
    told = {"gateway": f"127.0.0.1:{gateway.control_port}"}
    prefill = cluster.prefill(host="127.0.0.2", advertise_host="prefill", **told)
    buffer = json.dumps({"device_buffer_size": 128})
    decode = cluster.decode(host="127.0.0.3", advertise_host="decode", hisparse_config=buffer, **told)
    cluster.wait_ready()
    prefill.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster.url, [Job(PROMPT, 8)])
        wait_until(lambda: decode.metric("requests", state="prefilling") == 1, what="the prefill to be dispatched")
        prefill.kill()
        wait_until(lambda: decode.metric("host_slots", state="quarantined") > 0, what="its slots to be quarantined")

        hosts.say(prefill=["127.0.0.4"], decode=["127.0.0.3"])
        ports = {"port": prefill.http_port, "control_port": prefill.control_port}
        cluster.prefill(host="127.0.0.4", advertise_host="prefill", **ports, **told)
        assert answer.result() == [expected]
    wait_until(lambda: decode.metric("host_slots", state="quarantined") == 0, what="quarantine to end")
