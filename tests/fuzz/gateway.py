"""Sends bodies to a gateway process and looks at what they cost: `python -m tests.fuzz.gateway SEED INDEX [STOP]`."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil

from control.codec import encode
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.spawn import fork
from tests.fuzz.bodies import Case, case
from tests.fuzz.scripted_model import HONEST, ScriptedModel, beyond_bounds
from tests.fuzz.watched import ENVIRONMENT, MODULE, Measures
from tests.gateway.nodes import FakeNode
from tests.gateway.world import GLM_TEMPLATE, LONG_CONTEXT, MODEL, write_checkpoint

CALLBACK_S = 0.05
"""Of a processor, for one callback of the event loop."""
ANSWER_S = 30.0
HONEST_S = 5.0
"""On an idle machine, as ANSWER_S: `patience` is how many times as long it takes on this one."""
PEAK_BYTES, PEAK_PER_BYTE = 128 << 20, 256
"""Of one body, whose answers have 4096 tokens at most with log probabilities. The tokenizer takes 233 to 262 bytes for
a token, which is a byte here: measured with 0.26 to 1.05 million tokens."""
MOST_BODY_BYTES = 1 << 20
"""The gateway answers a larger one before it has come, and closes the connection."""
SETTINGS_BYTES = 8 << 20
"""Of several prompts together, what travels with each."""
BATCH = 250
"""After so many bodies memory is looked at."""
DRIFT_BYTES, DRIFT_OBJECTS = 256 << 20, 20_000
"""What the allocator keeps grows by some 120 MiB in the first thousands of bodies, and then no more."""
TRIES = 3
"""A body is at fault only if it fails each time: other processes and garbage collections take time, too."""
MOST_FINDINGS = 5


def patience() -> float:
    """How many processes share a processor: what counts as late depends on it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def overloaded() -> bool:
    """Whether a scripted node may get no processor for so long that it counts as lost, and clients are told 503."""
    return patience() > 2


@dataclass(frozen=True)
class Finding:
    seed: int
    index: int
    extreme: str
    problems: tuple[str, ...]
    module: str = "gateway"

    def __str__(self) -> str:
        replay = f".venv/bin/python -m tests.fuzz.{self.module} {self.seed} {self.index}"
        return f"{self.extreme}: {'; '.join(self.problems)}\n  replay: {replay}"


@dataclass
class Run:
    """What came of some bodies. statuses: of answers, by path."""

    findings: list[Finding] = field(default_factory=list)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    def share(self, path: str, status: int) -> float:
        """Of the answers of a path, those with that status."""
        return self.statuses[path, status] / sum(count for (of, _), count in self.statuses.items() if of == path)


class Service:
    """A gateway in a process of its own, with scripted nodes and an honest client in this one."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.measures = Measures(directory / "measures")
        checkpoint = write_checkpoint(directory / "checkpoint", GLM_TEMPLATE, LONG_CONTEXT, "glm_moe_dsa")
        environment = {ENVIRONMENT: str(directory / "measures")}
        self._cluster = Cluster(checkpoint, directory, MODULE, lambda _: environment, spawn=fork)
        self._gateway = self._cluster.gateway(served_model_name=MODEL)
        wait_until(lambda: "gateway starts" in self._gateway.log)
        address = self._gateway.control_address
        self._prefill = FakeNode(address, "prefill", max_request_tokens=LONG_CONTEXT).start()
        self.model = ScriptedModel(address, max_request_tokens=LONG_CONTEXT)
        self.model.start()
        self._cluster.wait_ready()
        self._process = psutil.Process(self._gateway.process.pid)
        # A connection for each body: the gateway closes one of which it has not read all.
        self._client = httpx.Client(
            base_url=self._cluster.url, timeout=None, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._honest_trouble: list[str] = []
        self._stopping = threading.Event()
        self._honest = threading.Thread(target=self._ask_honestly)
        self._honest.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._honest.join()
        self._cluster.__exit__()
        self._client.close()
        for node in (self._prefill, self.model):
            node.die()

    def _ask_honestly(self) -> None:
        found: int | str
        body = {"prompt": HONEST.decode(), "max_tokens": 4}
        with httpx.Client(base_url=self._cluster.url, timeout=None) as client:
            while not self._stopping.wait(0.05):
                began = time.monotonic()
                try:
                    found = client.post("/v1/completions", json=body, timeout=ANSWER_S * patience()).status_code
                except httpx.HTTPError as error:
                    found = repr(error)
                if found == 503 and overloaded():
                    continue
                if (took := time.monotonic() - began) > HONEST_S * patience() or found != 200:
                    self._honest_trouble.append(f"the honest client was told {found} after {took:.1f} s")

    def send(self, sent: Case) -> tuple[int | None, list[str]]:
        """The status of the answer, None without one, and all that is wrong."""
        self.model.plays(sent)
        self._honest_trouble.clear()
        self.measures.slowest = 0
        before = self._resident("VmRSS")
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # begins the peak anew
        try:
            headers = {"Content-Type": "application/json"}
            timeout = ANSWER_S * patience()
            answer = self._client.post(sent.path, content=sent.body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            if len(sent.body) > MOST_BODY_BYTES and isinstance(error, httpx.ReadError | httpx.WriteError):
                return 413, []
            return None, [f"no answer: {error!r}", *self._honest_trouble[:1]]
        if answer.status_code == 503 and overloaded():
            return 503, []
        problems = _wrong_answer(answer)
        if (slowest := self.measures.slowest) > CALLBACK_S:
            problems.append(f"a callback took {slowest * 1000:.0f} ms of a processor")
        if (peak := self._resident("VmHWM") - before) > PEAK_BYTES + PEAK_PER_BYTE * len(sent.body):
            problems.append(f"memory rose by {peak >> 20} MiB")
        asked = self.model.asked_by_case
        problems += [found for message in asked for found in beyond_bounds(message)]
        frames, most = sum(len(encode(message, self.model.me)) for message in asked), _most_frame_bytes(sent)
        if frames > most:
            problems.append(f"{frames} bytes of frames for a body of {len(sent.body)}; at most {most}")
        return answer.status_code, problems + self._honest_trouble[:1]

    def _resident(self, kind: str) -> int:
        """Bytes: VmRSS is what there is now, VmHWM the peak."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition(f"{kind}:")[2].split()[0]) << 10

    def memory(self) -> tuple[int, int]:
        """Resident bytes and Python objects, once nothing is served any more and all nodes are there again."""
        self._cluster.wait_ready()
        answered = self._gateway.metric
        wait_until(lambda: answered("answer_bytes") == 0, what="answers to be forgotten")
        self.measures.objects = 0
        self._process.send_signal(signal.SIGUSR1)
        wait_until(lambda: self.measures.objects, what="a collection of garbage")
        return self._resident("VmRSS"), self.measures.objects

    @property
    def errors_in_log(self) -> list[str]:
        return [line for line in self._gateway.log.splitlines() if "Traceback" in line or "[error" in line]


def _most_frame_bytes(sent: Case) -> int:
    """A token of a byte takes two bytes, a number such as 1e15 in a schema is written out, a grammar has 65,536
    characters, and each choice has an id of its own. Where there are several prompts, settings travel with each."""
    several = SETTINGS_BYTES if sent.path == "/v1/completions" and b'"prompt":[' in sent.body else 0
    return 4 * len(sent.body) + (1 << 18) + several


def _wrong_answer(answer: httpx.Response) -> list[str]:
    """What is wrong with it: it is neither refused with a reason nor answered."""
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            broken = [line for line in answer.text.split("\n\n") if "internal" in line and '"error"' in line]
            return [f"the stream ended with {broken[0][:200]}"] if broken else []
        found = json.loads(answer.content, parse_constant=_refuse)
    except ValueError as error:
        return [f"the answer is no JSON: {error}"]
    if answer.status_code == 200:
        return []
    if not 400 <= answer.status_code < 500 or not found["error"]["message"]:
        return [f"status {answer.status_code}: {answer.text[:300]}"]
    return [f"an error of {len(answer.content)} bytes"] if len(answer.content) > 2000 else []


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def run(seed: int, indices: range, directory: Path) -> Run:
    """Send these bodies. After a body that gets no answer, another gateway goes on."""
    result, todo = Run(), iter(indices)
    for number in range(MOST_FINDINGS):
        with Service(directory / f"{seed}-{number}") as service:
            if not _goes_on(service, seed, todo, result):
                break
    return result


def _goes_on(service: Service, seed: int, todo: Iterator[int], result: Run) -> bool:
    """Whether this gateway has to be replaced, and bodies are left."""
    level: tuple[int, int] | None = None
    for sent, index in enumerate(todo, 1):
        body = case(seed, index)
        status, problems = service.send(body)
        for _ in range(TRIES - 1):
            if problems and status is not None:
                service.memory()  # What the allocator kept of the last time would hide a peak.
                status, problems = service.send(body)
        if status is not None:
            result.statuses[body.path, status] += 1
        if sent % BATCH == 0:
            resident, objects = service.memory()
            before, known = level = level or (resident, objects)
            if resident > before + DRIFT_BYTES or objects > known + DRIFT_OBJECTS:
                problems.append(
                    f"up to here memory grew from {before >> 20} to {resident >> 20} MiB, {known} to {objects} objects"
                )
        if problems:
            result.findings.append(Finding(seed, index, body.extreme, tuple(problems)))
            print(result.findings[-1], flush=True)
            if status is None or len(result.findings) >= MOST_FINDINGS:
                return status is None
    if service.errors_in_log:
        result.findings.append(Finding(seed, 0, "the log", tuple(service.errors_in_log[:5])))
    return False


if __name__ == "__main__":
    seed, first, *stop = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        done = run(seed, range(first, stop[0] if stop else first + 1), Path(name))
    print(sorted(done.statuses.items()))
    sys.exit(len(done.findings))
