"""Sends messages to a node and looks at what they cost: `python -m tests.fuzz.node ROLE SEED INDEX [STOP]`."""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from control.codec import encode
from control.keys import generate
from control.messages import AttemptId, Cancel, FetchRequest, Message, Role
from control.messages.requests import MAX_CHOICES
from model.tiny import write_tiny_checkpoint
from tests.e2e.asking import ask, ids_of
from tests.e2e.cluster import HOT_BUFFER, Cluster, wait_until
from tests.e2e.spawn import fork
from tests.fuzz.gateway import TRIES, Finding, patience
from tests.fuzz.hostile import HOSTILE_SALT, Hostile
from tests.fuzz.messages import Sent, message
from tests.fuzz.watched import ENVIRONMENT, MODULE, Measures
from tests.fuzz.wire import known_values
from tests.work import slowness
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S

TURN_S, TURN_S_PER_BYTE = 0.1, 2e-7
"""Of a processor, for one turn of the node's loop, and for what its control thread does with one message; times
`slowness`.
"""
PEAK_BYTES, PEAK_PER_BYTE = 32 << 20, 100
"""Of one message: an empty map, which is one byte, takes 64 as a dict."""
DRIFT_BYTES, DRIFT_OBJECTS = 128 << 20, 300_000
"""After the first 1000 messages. Of 65,536 requests and as many attempts that have ended the ids are kept."""
BATCH = 50
"""After so many messages every request is cancelled, and the node must hold nothing."""
ANSWER_S, HONEST_S = 20.0, 10.0
RELEASE_S = ANSWER_S + DRAIN_GRACE_S + LANDED_CAN_WAIT_S
"""A prefill node may say of what it has sent that bytes linger. The slots then wait for a fence."""
MOST_FINDINGS = 5
SENDERS: Mapping[Role, tuple[Role, ...]] = {"decode": ("gateway", "prefill")}


class Service:
    """A gateway and two nodes in processes of their own, an honest client, and the hostile processes in this one."""

    def __init__(self, directory: Path, to: Role) -> None:
        directory.mkdir(parents=True)
        keys, checkpoint = directory / "keys", directory / "checkpoint"
        generate(keys)
        write_tiny_checkpoint(checkpoint, "deepseek_v32", seed=7, index_topk=64, layers=2)
        self.measures = Measures(directory / to)
        # Each role writes to a file of its own; one is looked at.
        self._cluster = Cluster(
            checkpoint, directory, MODULE, lambda name: {ENVIRONMENT: str(directory / name)}, spawn=fork
        )
        gateway = self._cluster.gateway(served_model_name="tiny", key_dir=keys)
        flags: dict[str, Any] = {"key_dir": keys, "log_level": "warning"}
        spy = Hostile("gateway", keys, "")
        flags["gateway"] = (gateway.control_address, spy.me.address)
        self._cluster.prefill(**flags)
        # All choices of one message fit, and those of a few fill it.
        queue = MAX_CHOICES + 32
        self._cluster.decode(**flags, hisparse_config=HOT_BUFFER, max_running_requests=8, max_queued_requests=queue)
        self._cluster.wait_ready(60 * patience(), prefill=1, decode=1)
        self.node = self._cluster.nodes[to]
        self._process = psutil.Process(self.node.process.pid)
        spy.to = self.node.control_address
        self._hostile: dict[Role, Hostile] = {"gateway": spy}
        for role in SENDERS[to][1:]:
            self._hostile[role] = Hostile(role, keys, self.node.control_address)
        wait_until(lambda: {"prefill", "decode"} <= spy.offers.keys(), what="the nodes to register")
        self.prompts: list[list[int]] = [[5] * 520]
        self._log_file = self.node.log_path.open()
        self.ends: Counter[str] = Counter()
        """How the hostile requests ended."""
        self._syncs = 0
        self._known = self._all_known(to)
        self._senders = {role: hostile.me.model_dump() for role, hostile in self._hostile.items()}
        self._to = to
        self._trouble: list[str] = []
        self._number = 0
        """Of the honest client's prompts."""
        self._asking = threading.Lock()
        """Held while the honest client asks."""
        self._stopping = threading.Event()
        self._honest = threading.Thread(target=self._ask_honestly)
        self._honest.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._honest.join()
        self._cluster.__exit__()
        for hostile in self._hostile.values():
            hostile.close()
        self._log_file.close()

    def _all_known(self, to: Role) -> dict[str, Any]:
        spy, *others = self._hostile.values()
        known = known_values(spy.me.address, lambda: self.prompts, lambda: [a for one in others for a in one.attempts])
        honest_node = spy.offers["prefill"].model_dump()
        if to == "decode":
            # Of its own requests the hostile prefill node may say what it wants.
            own = others[0].me.model_dump()
            known["Generate.prefill_nodes"] = lambda rng: [rng.choice([honest_node, own])]
            known["HeartbeatAck.prefill_nodes"] = lambda rng: [honest_node, own][: rng.randrange(1, 3)]
            known["Generate.cache_salt"] = lambda rng: rng.choice(["", HOSTILE_SALT])
        return known

    def message(self, seed: int, index: int) -> Sent:
        """Each batch has prompts of its own, which the honest client has, too."""
        rng = random.Random(f"prompts:{seed}:{index // BATCH}")
        self.prompts = [[rng.randrange(256) for _ in range(520)] for _ in range(2)]
        return message(seed, index, self._to, self._senders, self._known)

    def _ask_honestly(self) -> None:
        while not self._stopping.wait(0.5):
            with self._asking:
                trouble = self._ask_once()
                # The requests of the hostile gateway may fill the queue.
                if trouble and "429 Too Many Requests" not in trouble:
                    self._trouble.append(trouble)

    def _ask_once(self) -> str | None:
        """The same prompt twice: cached KV may be that of others, that of a new salt is not. Both answers are equal.

        Returns what is wrong.
        """
        self._number += 1
        prompt = self.prompts[self._number % len(self.prompts)][: (130, 500)[self._number % 2]]
        began = time.monotonic()
        try:
            salts: list[dict[str, str]] = [{}, {"cache_salt": f"own {self._number}"}]
            told = [ids_of(ask(self._cluster.url, prompt, 4, **salt)) for salt in salts]
        except (httpx.HTTPError, AssertionError) as error:
            return f"the honest client got {error!r}"
        if told[0] != told[1]:
            return f"the honest client got {told[0]}, and {told[1]} without the cache"
        took = time.monotonic() - began
        return f"the honest client waited for {took:.1f} s" if took > HONEST_S * patience() else None

    def send(self, sent: Sent) -> list[str]:
        """What is wrong after a message."""
        self._trouble.clear()
        before = self._resident("VmRSS")
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self.measures.slowest = 0
        sender = self._hostile[sent.role]
        # An id may be one of the last messages', which was accepted.
        self._hostile["gateway"].accepted.difference_update(sent.request_ids)
        for parts in sent.parts:
            sender.send(parts)
        # Twice: the first answer comes in the middle of the turn that is measured.
        if trouble := self._is_deaf() or self._is_deaf():
            return [trouble, *self._trouble[:1]]
        problems = []
        limit = TURN_S + TURN_S_PER_BYTE * len(max(max(sent.parts), key=len, default=b""))
        if (slowest := self.measures.slowest) > limit and slowest > limit * slowness():
            problems.append(f"a turn took {slowest * 1000:.0f} ms of a processor")
        if (peak := self._resident("VmHWM") - before) > PEAK_BYTES + PEAK_PER_BYTE * sent.num_bytes:
            problems.append(f"memory rose by {peak >> 20} MiB for {sent.num_bytes} bytes")
        if sent.too_large and self._hostile["gateway"].accepted.intersection(sent.request_ids):
            problems.append("it was taken, with more settings than a node may take")
        return problems + self._trouble[:1]

    def _is_deaf(self) -> str | None:
        """Why the node does not answer, after all that was sent; None if it does."""
        waiting = dict.fromkeys(self._hostile, f"sync {self._syncs}")
        self._syncs += 1
        until, again = time.monotonic() + ANSWER_S * patience(), 0.0
        while waiting:
            if (code := self.node.process.poll()) is not None:
                return f"the node ended with {code}: {self.node.log[-600:]}"
            if time.monotonic() > until:
                return f"no answer to {sorted(waiting)}"
            if time.monotonic() > again:
                # A frame that is too large closes its connection, and with it what follows is lost.
                again = time.monotonic() + 1.0
                for role, name in waiting.items():
                    self._hostile[role].send((encode(self._sync(role, name), self._hostile[role].me),))
            waiting = {role: name for role, name in waiting.items() if name not in self._hostile[role].said}
            time.sleep(0.001)
        return None

    def _sync(self, role: Role, name: str) -> Message:
        """What the node answers with that name."""
        if role == "gateway":
            return Cancel(request_id=name)
        return FetchRequest(attempt=AttemptId(self._hostile[role].me.boot_id, name, 1), start=0, stop=1)

    def settle(self, request_ids: set[str]) -> list[str]:
        """What the node still holds after all requests were cancelled and the honest client has stopped, which is
        served then.

        A request that was taken does not fail, unless the hostile prefill node has sent its KV.
        """
        gateway = self._hostile["gateway"]
        with self._asking:
            for one in request_ids:
                gateway.send((encode(Cancel(request_id=one), gateway.me),))
            until, held = time.monotonic() + RELEASE_S * patience(), self._held()
            while held and time.monotonic() < until and self.node.process.poll() is None:
                time.sleep(0.02)
                held = self._held()
            unserved = self._ask_once()
        served = set[str]().union(*(hostile.served for hostile in self._hostile.values()))
        ended, gateway.ended = list(gateway.ended.items()), {}
        failed = [why for one, why in ended if "step failed" in why and one not in served]
        self.ends.update(why.partition(":")[0] for _, why in ended)
        if (code := self.node.process.poll()) is not None:
            return [f"the node ended with {code}: {self.node.log[-600:]}"]
        return failed[:1] + ([f"the node holds {held}"] if held else []) + ([unserved] if unserved else [])

    def _held(self) -> dict[str, float]:
        try:
            text = self.node.get("/metrics").text
        except httpx.HTTPError as error:
            return {f"no metrics: {error!r}": 1.0}
        names = ("requests", "host_slots", "device_slots", "rows", "prefill_pages")
        free = ('state="free"', 'state="cached"', "_total", "_created")
        found = (
            line.rpartition(" ")
            for line in text.splitlines()
            if line.startswith(tuple(f"hisparse_pd_{n}{{" for n in names))
        )
        return {name: float(value) for name, _, value in found if float(value) and not any(f in name for f in free)}

    def memory(self) -> tuple[int, int]:
        """Resident bytes and Python objects."""
        self.measures.objects = 0
        self._process.send_signal(signal.SIGUSR1)
        wait_until(lambda: self.measures.objects, what="a collection of garbage")
        return self._resident("VmRSS"), self.measures.objects

    def _resident(self, kind: str) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition(f"{kind}:")[2].split()[0]) << 10

    def new_errors(self) -> list[str]:
        """Those in the log since the last call."""
        lines = self._log_file.read().splitlines()
        return [line[:2000] for line in lines if "Traceback" in line or "level=critical" in line][:3]


def run(to: Role, seed: int, indices: range, directory: Path) -> tuple[list[Finding], Counter[str]]:
    """Send these messages to a node. Also returns how many of the hostile requests ended for which reason."""
    findings: list[Finding] = []
    with Service(directory / f"{to}-{seed}", to) as service:
        ids, level = set[str](), None
        for index in indices:
            sent = service.message(seed, index)
            problems = service.send(sent)
            for _ in range(TRIES - 1):
                if problems and service.node.process.poll() is None:
                    # With ids of its own: a request that is there already costs nothing.
                    ids |= {*sent.request_ids}
                    problems = service.send(sent := service.message(seed, index))
            ids |= {*sent.request_ids}
            if (index + 1) % BATCH == 0 or index + 1 == indices.stop:
                problems += service.settle(ids)
                ids.clear()
            if (index + 1) % (20 * BATCH) == 0:
                resident, objects = service.memory()
                level = level or (resident, objects)
                print(f"{index + 1} messages: {resident >> 20} MiB, {objects} objects", flush=True)
                if resident > level[0] + DRIFT_BYTES or objects > level[1] + DRIFT_OBJECTS:
                    problems.append(f"memory grew from {level} to {(resident, objects)}")
            problems += service.new_errors()
            if problems:
                findings.append(Finding(seed, index, f"{sent.kind}, {sent.extreme}", tuple(problems), f"node {to}"))
                print(findings[-1], flush=True)
                if service.node.process.poll() is not None or len(findings) >= MOST_FINDINGS:
                    break
        return findings, service.ends


if __name__ == "__main__":
    # As in the tests: threads of torch that wait for each other would take time of the turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    role, (seed, first, *stop) = sys.argv[1], map(int, sys.argv[2:])
    with tempfile.TemporaryDirectory() as name:
        found, counted = run(role, seed, range(first, stop[0] if stop else first + 1), Path(name))  # type: ignore[arg-type]
    print(sorted(counted.items()))
    sys.exit(len(found))
