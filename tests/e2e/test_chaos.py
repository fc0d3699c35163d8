"""Everything goes wrong at once, at random: no byte is wrong, no slot is lost, no request hangs.

HISPARSE_PD_CHAOS_SECONDS (20 by default, 60 in .ci/run) and HISPARSE_PD_CHAOS_SEED say how long, and which faults.
"""

import heapq
import itertools
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chaos_audit import Audit
from tests.e2e.chaos_clients import SECONDS, SEED, Clients, Prompt, assert_as_before, prompts_with_answers
from tests.e2e.chaos_schedule import DECODE_NODES, PREFILL_NODES, Action, Fault, schedule
from tests.e2e.cluster import Cluster, Node, wait_until
from tests.e2e.conftest import TOKEN_BYTES, References
from tests.e2e.faulty_node import MODULE, Faults, Switches
from tests.e2e.spawn import fork

LENGTHS = (1, 7, 40, 64, 129, 200, 333, 512, 700, 1000, 1500, 3000)
HOST_SLOTS = 4200
"""One of the longest prompts fits, or some shorter ones: slots are scarce and used again at once."""
REQUEST_TIMEOUT_S = 40.0
PATIENCE_S = REQUEST_TIMEOUT_S + 10.0
CONCURRENCY = 16
LOST = "lost at its decode node ("
"""A stream ended with its decode node, and was not at two nodes that died."""


def faults_of(name: str, directory: Path) -> Faults:
    """Of the gateway only, messages are lost one in a thousand: it is told each token once, and a gap ends a stream."""
    common = {"directory": str(directory), "name": name, "seed": SEED}
    if name == "gateway":
        return Faults(**common, drop=0.001)
    return Faults(**common, drop=0.08, delay=0.15, delay_s=1.0, slow=0.05, slow_s=(0.0, 3.0))


class Conductor:
    """Carries a schedule out, and notes what it did."""

    def __init__(self, cluster: Cluster, switches: Switches) -> None:
        self.notes: list[str] = []
        self._cluster = cluster
        self._switches = switches
        self._down: set[str] = set()

    def play(self, faults: list[Fault], seconds: float) -> None:
        order = itertools.count()
        todo = [(fault.at, next(order), fault, False) for fault in faults]
        heapq.heapify(todo)
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds or todo:
            while todo and todo[0][0] <= now:
                _, _, fault, has_begun = heapq.heappop(todo)
                if not (self._end if has_begun else self._begin)(fault):
                    heapq.heappush(todo, (now + 0.1, next(order), fault, has_begun))
                elif not has_begun:
                    # Not before: one that had to wait for its node would be undone before it came about.
                    heapq.heappush(todo, (now + fault.lasts, next(order), fault, True))
            for node in self._cluster.nodes.values():
                if node.name not in self._down:
                    node.check_alive()
            time.sleep(0.05)

    def _begin(self, fault: Fault) -> bool:
        """Bring a fault about; whether it was time for it."""
        node = self._cluster.nodes[fault.node]
        if node.name in self._down:
            return False
        if node.name in DECODE_NODES and self._cluster.nodes["gateway"].metric("nodes", role="decode") < 2:
            # The other one has not come up yet.
            return False
        self._note(f"{fault.action.name} {node.name}, pid {node.process.pid}, for {fault.lasts:.1f} s")
        match fault.action:
            case Action.KILL:
                self._down.add(node.name)
                node.kill()
            case Action.TERMINATE:
                self._down.add(node.name)
                node.signal(signal.SIGTERM)
            case Action.STOP:
                node.signal(signal.SIGSTOP)
            case Action.DEAFEN:
                self._switches.deaf(node.name).touch()
        return True

    def _end(self, fault: Fault) -> bool:
        """Undo a fault; False if a process that was told to end has not done so yet."""
        node = self._cluster.nodes[fault.node]
        match fault.action:
            case Action.KILL | Action.TERMINATE:
                if (code := node.process.poll()) is None:
                    return False
                # One that had not come up yet does not handle the signal.
                allowed = (-signal.SIGKILL,) if fault.action is Action.KILL else (0, -signal.SIGTERM)
                assert code in allowed, f"{node.name} ended with {code}"
                self._cluster.restart(node)
                self._down.remove(node.name)
            case Action.STOP:
                node.signal(signal.SIGCONT)
            case Action.DEAFEN:
                self._switches.deaf(node.name).unlink()
        self._note(f"end of {fault.action.name} {node.name}, pid {node.process.pid}")
        return True

    def _note(self, what: str) -> None:
        now = time.time()
        self.notes.append(f"{time.strftime('%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03} {what}")


@pytest.fixture
def prompts(references: References) -> list[Prompt]:
    return prompts_with_answers(references["deepseek_v32"], LENGTHS, seed=5)


@pytest.fixture
def cluster(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Cluster]:
    """Two prefill nodes with different page sizes and transports, and two decode nodes that both reach."""
    directory = tmp_path / "faults"
    directory.mkdir()
    cluster = Cluster(
        checkpoints["deepseek_v32"], tmp_path, MODULE, lambda name: faults_of(name, directory).environment(), spawn=fork
    )
    with cluster:
        cluster.gateway(served_model_name="tiny", request_timeout=REQUEST_TIMEOUT_S)
        longest = {"context_length": 4096}
        common = {**longest, "transfer_checksum": "full", "chunked_prefill_size": 512, "max_total_tokens": 8000}
        common["fetch_prefixes"] = "always"
        shm, tcp = PREFILL_NODES
        cluster.prefill(shm, transfer_protocol="auto", page_size=64, **common)
        cluster.prefill(tcp, transfer_protocol="tcp", page_size=16, **common)
        config = {"device_buffer_size": 128, "host_pool_gib": HOST_SLOTS * TOKEN_BYTES / 2**30}
        for name in DECODE_NODES:
            cluster.decode(
                name,
                transfer_protocol="auto",
                hisparse_config=json.dumps(config),
                max_running_requests=6,
                max_device_slots=5 * 160,
                prefill_retries=4,
                debug_verify_swap_in=True,
                **longest,
            )
        yield cluster


@pytest.mark.timeout(SECONDS + 1000)
def test_no_byte_wrong_no_slot_lost_no_request_hangs(cluster: Cluster, prompts: list[Prompt], tmp_path: Path) -> None:
    """Corruption under concurrent transfers (vllm 44238, sglang 23020), late writes (sglang PRs 24580, 31357)."""
    cluster.wait_ready()
    switches = Switches(tmp_path / "faults")
    conductor = Conductor(cluster, switches)
    clients = Clients(cluster.url, prompts, random.Random(SEED), CONCURRENCY, PATIENCE_S)
    with clients.asking(conductor.notes):
        switches.chaos.touch()
        try:
            conductor.play(schedule(SEED, SECONDS), SECONDS)
            # On a slow machine fewer get through meanwhile: the rest may, while messages and writes go on being spoilt.
            wait_until(lambda: clients.exact >= SECONDS / 2, 90, "enough requests to get through")
        finally:
            switches.chaos.unlink()

    assert [ended for ended in clients.ended if LOST in ended.kind] == []
    cluster.wait_ready()
    assert_as_before(cluster.url, prompts)
    twice = prompts[-2]
    for _ in range(2):
        assert_as_before(cluster.url, [twice])
    # Slots of which something lingers, since a connection was cut under a write, are held for 30 s.
    wait_until(lambda: left_over(cluster) == {}, 60, "everything to come back")

    audit = Audit.of(tmp_path / "faults")
    print(f"audited prompts: {audit.seen}, with {audit.blocks} blocks")
    assert audit.wrong == []
    assert audit.seen["landed"] > 0
    assert audit.seen["begun"] >= clients.exact
    hits = [cluster.nodes[name].metric("prefix_cache_hits_total", side="decode") for name in DECODE_NODES]
    assert sum(hits) >= len(twice.ids) // 2
    for transport in ("shm", "tcp"):
        assert any(f"transport={transport}" in cluster.nodes[name].log for name in PREFILL_NODES)
    assert suspicious_lines(cluster) == []


def left_over(cluster: Cluster) -> dict[str, float]:
    """What is held although nobody asks for anything: nothing, that is."""
    held = {}
    for name in DECODE_NODES:
        decode = cluster.nodes[name]
        for state in ("used", "quarantined"):
            held[f"host slots {state} of {name}"] = decode.metric("host_slots", state=state)
        held[f"device slots of {name}"] = decode.metric("device_slots", state="used")
    for node in cluster.nodes.values():
        held[f"requests of {node.name}"] = requests_of(node)
    for name in PREFILL_NODES:
        held[f"pages of {name}"] = cluster.nodes[name].metric("prefill_pages", state="used")
    return {what: count for what, count in held.items() if count}


def requests_of(node: Node) -> float:
    """Requests that a process holds, in whatever state."""
    values = httpx.get(f"{node.base_url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in values if line.startswith("hisparse_pd_requests{"))


def suspicious_lines(cluster: Cluster) -> list[str]:
    """Log lines that tell of a bug: no fault that was brought about here is an error, or a mismatch, to a process.

    A client that leaves while its request is being read is one to uvicorn.
    """
    words = (
        "level=error",
        "level=critical",
        "Traceback",
        "leak",
        "mismatch",
        "do not match",
        "step failed",
        "sending failed",
    )
    return [
        f"{node.name}: {line[:300]}"
        for node in cluster.nodes.values()
        for line in node.log.splitlines()
        if any(word in line for word in words) and "ClientDisconnect" not in line
    ]
