"""A gateway, two prefill and two decode nodes, each on a host of its own, with a control and a data network."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Job, Node, Place, complete, wait_until
from tests.e2e.conftest import TOKEN_BYTES, Reference
from tests.e2e.hosts import Host, Network, why_not
from tests.e2e.test_parity import prompts

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
PORTS = "15000-15031"
PROMPTS = prompts((800, 300, 500, 64, 700, 1, 250, 600), seed=3)


class Site:
    """The hosts and what runs on them. The tests themselves run on the host `client`."""

    def __init__(self, network: Network, model_path: Path, directory: Path, reference: Reference) -> None:
        self.network = network
        self.reference = reference
        self.cluster = Cluster(model_path, directory, places=self._place)
        for name in ("gateway", "client"):
            network.host(name, "control")
        for name in (*PREFILL, *DECODE):
            network.host(name)

    def start(self) -> None:
        longest: dict[str, object] = {"context_length": 1200, "transfer_protocol": "tcp", "transfer_ports": PORTS}
        self.cluster.gateway(served_model_name="tiny")
        for name in PREFILL:
            self.cluster.prefill(name, chunked_prefill_size=256, page_size=16, transfer_checksum="full", **longest)
        config = {"device_buffer_size": 128, "host_pool_gib": 4000 * TOKEN_BYTES / 2**30}
        for name in DECODE:
            self.cluster.decode(name, hisparse_config=json.dumps(config), debug_verify_swap_in=True, **longest)
        self.cluster.wait_ready()

    @property
    def prefill(self) -> list[Node]:
        return [self.cluster.nodes[name] for name in PREFILL]

    @property
    def decode(self) -> list[Node]:
        return [self.cluster.nodes[name] for name in DECODE]

    def host_of(self, node: Node) -> Host:
        return self.network.hosts[node.name]

    def assert_serves(self, times: int = 1) -> None:
        """All prompts at once, so often, say what the reference says, and every slot is free again."""
        jobs = [Job(prompt, 24) for prompt in PROMPTS] * times
        expected = [self.reference.generate(job.prompt_ids, job.max_tokens) for job in jobs]
        assert complete(self.cluster.url, jobs, concurrency=8) == expected
        self.wait_all_free()

    def wait_all_free(self, timeout: float = 30.0) -> None:
        for state in ("quarantined", "used"):
            wait_until(lambda: self._slots(state) == 0, timeout, f"no slots to be {state}")

    def used(self) -> dict[str, float]:
        """How much every node has done so far, in tokens."""
        prompt = {node.name: node.metric("prompt_tokens_total") for node in self.prefill}
        return prompt | {node.name: node.metric("generated_tokens_total") for node in self.decode}

    def _slots(self, state: str) -> float:
        return sum(node.metric("host_slots", state=state) for node in self.decode)

    def _place(self, name: str) -> Place:
        host = self.network.hosts[name]
        words = ("--transfer-host", host.addresses["data"]) if "data" in host.addresses else ()
        return Place(host.addresses["control"], host.prefix, words)


@pytest.fixture(scope="module")
def site(
    checkpoints: dict[str, Path], references: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("hosts")
    with Network("control", "data") as network:
        made = Site(network, checkpoints["deepseek_v32"], directory, references["deepseek_v32"])
        with network.hosts["client"].entered(), made.cluster:
            made.start()
            yield made


@pytest.fixture
def ask(site: Site) -> Iterator[Callable[[list[int], int], "Future[list[list[int]]]"]]:
    """Ask for a completion in the background."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda prompt, tokens: pool.submit(complete, site.cluster.url, [Job(prompt, tokens)])


def test_requests_from_another_host_are_exact_and_every_node_takes_part(site: Site) -> None:
    site.assert_serves()
    assert all(tokens > 0 for tokens in site.used().values()), site.used()


def test_kv_travels_on_the_data_network_and_not_on_the_control_network(site: Site) -> None:
    hosts = [site.host_of(node) for node in site.prefill]
    before = [(host.bytes_sent("data"), host.bytes_sent("control")) for host in hosts]
    moved = sum(node.metric("transfer_bytes_total") for node in site.prefill)
    site.assert_serves()
    moved = sum(node.metric("transfer_bytes_total") for node in site.prefill) - moved
    after = [(host.bytes_sent("data"), host.bytes_sent("control")) for host in hosts]
    data = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
    control = sum(now[1] - then[1] for now, then in zip(after, before, strict=True))
    assert moved >= sum(map(len, PROMPTS)) * TOKEN_BYTES
    assert moved < data < 1.3 * moved
    assert control < moved / 10


def test_with_10_ms_of_delay_and_1_percent_of_loss_requests_are_exact(site: Site) -> None:
    with site.network.impaired(delay_ms=10, loss=0.01):
        site.assert_serves()
    site.assert_serves()
