"""A gateway, two prefill and two decode nodes, each on a host of its own, with a control and a data network."""

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from control.keys import generate, load_token
from tests.e2e.asking import Job, Load, assert_exact, random_prompts
from tests.e2e.cluster import Cluster, Node, Place, wait_until
from tests.e2e.conftest import TOKEN_BYTES, Reference, References
from tests.e2e.hosts import Host, Network, why_not
from tests.e2e.spawn import fork, start_fork_server

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
PORTS = range(15000, 15032)
RECIPE = Path(__file__).parents[2] / "deploy/nftables/hisparse-pd.nft"
PROMPTS = random_prompts((800, 300, 500, 64, 700, 1, 250, 600), seed=3)
JOBS = [Job(prompt, 24) for prompt in PROMPTS]


class Site:
    """The hosts and what runs on them. The tests themselves run on the host `client`."""

    def __init__(self, network: Network, model_path: Path, directory: Path, reference: Reference) -> None:
        self.network = network
        self.reference = reference
        self.keys = directory / "keys"
        generate(self.keys)
        self.cluster = Cluster(model_path, directory, places=self._place, spawn=fork)
        for name in ("gateway", "client"):
            network.host(name, "control")
        for name in (*PREFILL, *DECODE):
            network.host(name)

    @property
    def operator(self) -> dict[str, str]:
        """What an operator shows to decode nodes."""
        return {"Authorization": f"Bearer {load_token(self.keys)}"}

    def start(self) -> None:
        longest: dict[str, object] = {
            "context_length": 1200,
            "transfer_protocol": "tcp",
            "transfer_ports": f"{PORTS[0]}-{PORTS[-1]}",
            "key_dir": self.keys,
            # Every prompt is to travel, each time that it is asked.
            "no_enable_prefix_caching": True,
        }
        # Its clients need no API key: the control plane is closed all the same.
        self.cluster.gateway(served_model_name="tiny", key_dir=self.keys, insecure=True)
        for name in PREFILL:
            self.cluster.prefill(name, chunked_prefill_size=256, page_size=16, transfer_checksum="full", **longest)
        config = {"device_buffer_size": 128, "host_pool_gib": 4000 * TOKEN_BYTES / 2**30}
        for name in DECODE:
            self.cluster.decode(name, hisparse_config=json.dumps(config), debug_verify_swap_in=True, **longest)
        self.cluster.wait_ready(timeout=150)

    @property
    def prefill(self) -> list[Node]:
        return [self.cluster.nodes[name] for name in PREFILL]

    @property
    def decode(self) -> list[Node]:
        return [self.cluster.nodes[name] for name in DECODE]

    def host_of(self, node: Node) -> Host:
        return self.network.hosts[node.name]

    def assert_serves(self) -> None:
        """All prompts at once say what the reference says, and every slot is free again."""
        assert_exact(self.cluster.url, self.reference, JOBS, concurrency=8)
        self.wait_all_free()

    def wait_all_free(self, timeout: float = 60.0) -> None:
        """Slots of which something lingers, since a connection was cut under a write, are held for 30 s."""
        wait_until(lambda: self.slots("used") == self.slots("quarantined") == 0, timeout, "all slots to be free")

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Meanwhile, clients ask for one prompt after another. All answers are exact."""
        with Load([self.cluster.url], self.reference, JOBS).running(4):
            yield

    def landed(self, prefill: Node, decode: Node) -> int:
        """How many prompts of this pair of nodes, at the addresses that they have now, have landed so far."""
        return len(re.findall(rf"event=landed .*node={re.escape(prefill.control_address)}\b", decode.log))

    def pairs(self) -> dict[tuple[str, str], int]:
        return {(p.name, d.name): self.landed(p, d) for p in self.prefill for d in self.decode}

    def restart_at_another_address(self, node: Node) -> None:
        """Start it again on its host, which has other addresses now."""
        host = self.host_of(node)
        for network, address in list(host.addresses.items()):
            host.move_to(network, f"{address}0")
        self.cluster.restart(node)
        wait_until(node.is_up, 60, f"{node.name} to be back")

    def recipe(self) -> Path:
        """The recipe for firewalls, filled in for these hosts."""
        peers = [self.host_of(node).addresses["data"] for node in (*self.prefill, *self.decode)]
        text = RECIPE.read_text()
        for name, value in (
            ("transfer_ports", f"{PORTS[0]}-{PORTS[-1]}"),
            ("data_interfaces", '{ "data" }'),
            ("peers", f"{{ {', '.join(peers)} }}"),
        ):
            text, count = re.subn(rf"(?m)^define {name} = .*$", f"define {name} = {value}", text)
            assert count == 1, name
        path = self.cluster.directory / "hisparse-pd.nft"
        path.write_text(text)
        return path

    def slots(self, state: str) -> float:
        return sum(node.metric("host_slots", state=state) for node in self.decode)

    def _place(self, name: str) -> Place:
        host = self.network.hosts[name]
        words = ("--transfer-host", host.addresses["data"]) if "data" in host.addresses else ()
        return Place(host.addresses["control"], host.inside, words)


@pytest.fixture(scope="module")
def site(
    checkpoints: dict[str, Path], references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("hosts")
    start_fork_server()  # on the machine: the client's host ends with these tests
    with Network("control", "data") as network:
        made = Site(network, checkpoints["deepseek_v32"], directory, references["deepseek_v32"])
        with network.hosts["client"].entered(), made.cluster:
            made.start()
            yield made


def test_requests_from_another_host_are_exact_on_every_pair_of_nodes(site: Site) -> None:
    site.assert_serves()
    with site.under_load():
        wait_until(lambda: all(site.pairs().values()), 60, "every pair to have served")
    site.wait_all_free()


def test_kv_travels_on_the_data_network_and_not_on_the_control_network(site: Site) -> None:
    hosts = [site.host_of(node) for node in site.prefill]
    before = [(host.bytes_sent("data"), host.bytes_sent("control")) for host in hosts]
    moved = -sum(node.metric("transfer_bytes_total") for node in site.prefill)
    site.assert_serves()
    moved += sum(node.metric("transfer_bytes_total") for node in site.prefill)
    after = [(host.bytes_sent("data"), host.bytes_sent("control")) for host in hosts]
    data = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
    control = sum(now[1] - then[1] for now, then in zip(after, before, strict=True))
    assert moved >= sum(len(prompt) - 1 for prompt in PROMPTS) * TOKEN_BYTES
    assert moved < data < 1.3 * moved
    assert control < moved / 10


def test_with_10_ms_of_delay_and_1_percent_of_loss_requests_are_exact(site: Site) -> None:
    with site.network.impaired(delay_ms=10, loss=0.01):
        site.assert_serves()
    site.assert_serves()


@pytest.mark.slow
def test_a_partition_between_two_nodes_costs_their_requests_a_retry(site: Site) -> None:
    prefill, decode = site.prefill[0], site.decode[0]
    apart = (site.host_of(prefill), site.host_of(decode))
    retries = decode.metric("prefill_retries_total")
    with site.under_load():
        wait_until(lambda: all(site.pairs().values()), 60, "every pair to have served")
        wait_until(lambda: decode.metric("requests", state="prefilling"), what="a prefill to be under way")
        site.network.part(*apart)
        since = time.monotonic()
        wait_until(lambda: decode.metric("prefill_retries_total") > retries, what="a request to be prefilled elsewhere")
        parted = site.pairs()
        others = parted.keys() - {(prefill.name, decode.name)}
        wait_until(lambda: all(site.pairs()[pair] > parted[pair] for pair in others), 60, "everybody else to go on")
        wait_until(lambda: time.monotonic() - since > 20, 25)
        assert site.landed(prefill, decode) == parted[prefill.name, decode.name]
        site.network.join(*apart)
        wait_until(
            lambda: site.landed(prefill, decode) > parted[prefill.name, decode.name], 60, "the pair to serve again"
        )
    site.wait_all_free()
    assert decode.metric("prefill_retries_total") - retries < 10


@pytest.mark.slow
def test_a_prefill_node_that_restarts_at_another_address_is_used_at_once(site: Site) -> None:
    prefill = site.prefill[1]
    with site.under_load():
        wait_until(lambda: prefill.metric("requests", state="computing"), what="a prefill to be under way")
        prefill.kill()
        site.restart_at_another_address(prefill)
        wait_until(lambda: all(site.landed(prefill, decode) for decode in site.decode), 60, "it to serve everybody")
    # Nobody answers at the old address any more, so that only an operator can say that the old process has ended.
    wait_until(lambda: site.slots("used") == 0, what="the last request to end")
    for decode in site.decode:
        with httpx.Client(base_url=decode.base_url, headers=site.operator) as operator:
            for boot_id in {lost["boot_id"] for lost in operator.get("/quarantine").json()["reservations"]}:
                operator.post("/quarantine/evict", params={"boot_id": boot_id}).raise_for_status()
    site.wait_all_free()


@pytest.mark.slow
def test_a_decode_node_that_restarts_at_another_address_is_used_at_once(site: Site) -> None:
    decode = site.decode[1]
    old = site.host_of(decode).addresses["data"]
    decode.kill()
    site.restart_at_another_address(decode)
    squatter = site.network.host("squatter", "data")
    squatter.move_to("data", old)
    with squatter.entered(), ExitStack() as at_end:
        listeners = [at_end.enter_context(socket.create_server((old, port))) for port in PORTS]
        with site.network.hosts["client"].entered():
            site.assert_serves()
            assert all(site.landed(prefill, decode) for prefill in site.prefill)
        assert select.select(listeners, [], [], 0)[0] == [], "nobody tried to write to whoever has the old address"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft") is None, reason="not installed: nft")
def test_the_nftables_recipe_keeps_strangers_from_the_transfer_ports(site: Site) -> None:
    stranger = site.network.host("stranger", "data")
    victim = site.decode[0]
    session = re.findall(r"session=(\S+)", victim.log)[-1]
    ports = re.findall(r"transfer_ports=(\d+),(\d+)", victim.log)[-1]
    assert f"ports={','.join(ports)}" in next(line for line in victim.log.splitlines() if "level=warning" in line)
    local = site.host_of(victim)

    assert stranger.run(sys.executable, "-c", OVERWRITE, stranger.addresses["data"], session) == "overwritten\n"
    assert can_connect(local, "127.0.0.1", ports, user="nobody")
    for node in (*site.prefill, *site.decode):
        site.host_of(node).run("nft", "--file", str(site.recipe()))
    assert not can_connect(stranger, local.addresses["data"], ports)
    assert not can_connect(site.network.hosts["client"], local.addresses["control"], ports), "another network"
    assert not can_connect(local, "127.0.0.1", ports, user="nobody")
    assert not can_connect(site.host_of(site.prefill[0]), local.addresses["data"], ports, user="nobody")
    assert stranger.run(sys.executable, "-c", OVERWRITE, stranger.addresses["data"], session) == "refused\n"

    before = site.pairs()
    with site.under_load():
        wait_until(lambda: all(count > before[pair] for pair, count in site.pairs().items()), 60, "every pair to serve")
    site.wait_all_free()


def test_the_nftables_recipe_loads_as_it_is_and_again() -> None:
    with Network("data") as network:
        host = network.host("host")
        for _ in range(2):
            host.run("nft", "--file", str(RECIPE))
        assert host.run("nft", "list", "tables") == "table inet hisparse_pd\n"


OVERWRITE = """
import os, sys
import numpy as np
os.environ.update(MC_FORCE_TCP="1", MC_LOG_LEVEL="ERROR")
from mooncake.engine import TransferEngine

me, session = sys.argv[1:]
engine = TransferEngine()
assert engine.initialize(me, "P2PHANDSHAKE", "tcp", "") == 0
mine = np.full(64, 77, dtype=np.uint8)
assert engine.register_memory(mine.ctypes.data, mine.nbytes) == 0
theirs = engine.get_first_buffer_address(session)
written = engine.transfer_sync_write(session, mine.ctypes.data, theirs, 64) if theirs else -1
mine[:] = 0
read = engine.transfer_sync_read(session, mine.ctypes.data, theirs, 64) if theirs else -1
print("overwritten" if written == read == 0 and (mine == 77).all() else "refused", flush=True)
os._exit(0)
"""
"""What anybody with Mooncake can do to a node: overwrite its memory, and read it."""

CONNECT = """
import socket, sys

for port in sys.argv[2:]:
    socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
"""


def can_connect(host: Host, address: str, ports: Sequence[str], user: str = "root") -> bool:
    """Whether all of the ports, or none of them, take connections from a process of that user on the host."""
    words = ["setpriv", f"--reuid={user}", "--clear-groups", sys.executable, "-c", CONNECT]
    done = [subprocess.run([*host.prefix, *words, address, port], capture_output=True, text=True) for port in ports]
    assert len({one.returncode for one in done}) == 1
    assert all("ConnectionRefusedError" in one.stderr for one in done if one.returncode), done
    return done[0].returncode == 0
