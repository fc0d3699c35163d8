"""What `/v1/cluster` says: the nodes, their last ten minutes, and the requests that wait longest for a token.

The gateway knows it from heartbeats and from its own requests. The history of a node takes 100 KiB.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import TypedDict

from base.version import VERSION
from control.messages import Role
from gateway.decode_client import DecodeClient
from gateway.generation import Generation, GenerationPhase
from gateway.registry import Node, NodeRegistry, NodeState

SAMPLE_S = 5.0
SAMPLES = 120
_SHOWN_REQUESTS = 20
_AT_NODE = (GenerationPhase.WAITING, GenerationPhase.STREAMING)


class NodeStatus(TypedDict):
    """A registered node.

    running_requests, queued_tokens, kv_usage, hot_usage: for all gateways, as its last heartbeat says. hits, misses:
    selections of all gateways' requests, in ten minutes. swapped_bytes_per_s, transferred_bytes_per_s: likewise, in the
    last sample. The others: for this one. requests: at it, of which `waiting` have no token. tokens_per_s: generated,
    in the last sample. prompt_tokens, prefix_hit_tokens: of answers that began in ten minutes. cached_tokens: what its
    prefix cache has; None: not known. history: by the name of a field, its values in ten minutes, the oldest sample
    first; None: the node was silent.
    """

    address: str
    role: Role
    state: NodeState
    heartbeat_age_s: float
    running_requests: int
    queued_tokens: int
    kv_usage: float
    hot_usage: float
    hits: int
    misses: int
    swapped_bytes_per_s: float
    transferred_bytes_per_s: float
    requests: int
    waiting: int
    tokens_per_s: float
    prompt_tokens: int
    prefix_hit_tokens: int
    cached_tokens: int | None
    history: dict[str, list[float | None]]


class RequestStatus(TypedDict):
    """An answer that is being generated. node: where it is. idle_s: since its last token, or since it arrived."""

    request_id: str
    phase: str
    node: str | None
    age_s: float
    idle_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    migrations: int


class ClusterReport(TypedDict):
    """unready: why no request can be served. phases: how many requests are in each. slowest: they wait the longest."""

    version: str
    unready: str | None
    sample_s: float
    samples: int
    phases: dict[str, int]
    nodes: list[NodeStatus]
    slowest: list[RequestStatus]


class _Sample(NamedTuple):
    """A node at a time, and what it has done since the sample before."""

    silent: bool
    running_requests: int
    queued_tokens: int
    kv_usage: float
    hot_usage: float
    since: Counter[str]
    """By name: what `Node.served` and `NodeTotals` count."""
    seconds: float

    def rate(self, name: str) -> float:
        return round(self.since[name] / self.seconds, 1)


@dataclass
class _SampledNode:
    """served: all that it had done by the last sample, which was taken at `at`."""

    served: Counter[str]
    at: float
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, node: Node, served: Counter[str], now: float) -> None:
        since, silent = served - self.served, node.state(now) == "lost"
        load = node.beat.running_requests, node.load, round(node.beat.kv_usage, 4), round(node.beat.hot_usage, 4)
        self.samples.append(_Sample(silent, *load, since, now - self.at))
        self.served, self.at = served, now


class ClusterStatus:
    """Samples the nodes and reports on them. The gateway's event loop owns it."""

    def __init__(self, registry: NodeRegistry, client: DecodeClient, unready_reason: Callable[[], str | None]) -> None:
        self._registry = registry
        self._client = client
        self._unready_reason = unready_reason
        self._sampled: dict[str, _SampledNode] = {}
        """By boot id."""

    async def sample_always(self) -> None:
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(SAMPLE_S)

    def sample(self, now: float) -> None:
        """Take a sample of each node. The first look at a node is none: it says from where to count."""
        at_nodes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for attempt in self._client.attempts.values():
            at_nodes[attempt.node.boot_id] += attempt.served
        sampled, self._sampled = self._sampled, {}
        for node in self._registry.nodes.values():
            boot = node.peer.boot_id
            served = node.served + at_nodes[boot] + Counter(node.beat.totals.model_dump())
            known = self._sampled[boot] = sampled.get(boot) or _SampledNode(served, now)
            if now > known.at:
                known.add(node, served, now)

    def report(self, now: float) -> ClusterReport:
        generations = self._client.generations
        phases = Counter(generation.phase.value for generation in generations)
        here = Counter((each.node.boot_id, each.generation.phase) for each in self._client.attempts.values())

        def waits(generation: Generation) -> tuple[int, float]:
            """Those that get tokens all the time differ by noise: the oldest comes first."""
            return int(generation.progress_at - now), generation.request.arrived

        return {
            "version": VERSION,
            "unready": self._unready_reason(),
            "sample_s": SAMPLE_S,
            "samples": SAMPLES,
            "phases": {phase.value: phases[phase.value] for phase in (GenerationPhase.PLACING, *_AT_NODE)},
            "nodes": sorted(
                (self._node(node, here, now) for node in self._registry.nodes.values()),
                key=lambda each: each["address"],
            ),
            "slowest": [_request(each, now) for each in sorted(generations, key=waits)[:_SHOWN_REQUESTS]],
        }

    def _node(self, node: Node, here: Counter[tuple[str, GenerationPhase]], now: float) -> NodeStatus:
        boot = node.peer.boot_id
        samples: Sequence[_Sample] = () if (sampled := self._sampled.get(boot)) is None else sampled.samples

        def total(name: str) -> int:
            return sum(sample.since[name] for sample in samples)

        def history(read: Callable[[_Sample], float]) -> list[float | None]:
            return [None if sample.silent else read(sample) for sample in samples]

        return {
            "address": node.peer.address,
            "role": node.offer.role,
            "state": node.state(now),
            "heartbeat_age_s": round(now - node.last_heartbeat, 1),
            "running_requests": node.beat.running_requests,
            "queued_tokens": node.load,
            "kv_usage": round(node.beat.kv_usage, 4),
            "hot_usage": round(node.beat.hot_usage, 4),
            "hits": total("hits"),
            "misses": total("misses"),
            "swapped_bytes_per_s": samples[-1].rate("swapped_bytes") if samples else 0.0,
            "transferred_bytes_per_s": samples[-1].rate("transferred_bytes") if samples else 0.0,
            "requests": sum(here[boot, phase] for phase in _AT_NODE),
            "waiting": here[boot, GenerationPhase.WAITING],
            "tokens_per_s": samples[-1].rate("generated") if samples else 0.0,
            "prompt_tokens": total("prompt"),
            "prefix_hit_tokens": total("cached"),
            "cached_tokens": self._registry.cached_tokens(node.peer),
            "history": {
                "running_requests": history(lambda sample: sample.running_requests),
                "tokens_per_s": history(lambda sample: sample.rate("generated")),
                "queued_tokens": history(lambda sample: sample.queued_tokens),
                "kv_usage": history(lambda sample: sample.kv_usage),
                "hot_usage": history(lambda sample: sample.hot_usage),
                "swapped_bytes_per_s": history(lambda sample: sample.rate("swapped_bytes")),
                "transferred_bytes_per_s": history(lambda sample: sample.rate("transferred_bytes")),
            },
        }


def _request(generation: Generation, now: float) -> RequestStatus:
    request, outcome = generation.request, generation.request.outcome
    return {
        "request_id": request.request_id,
        "phase": generation.phase.value,
        "node": outcome.nodes[-1] if generation.phase in _AT_NODE else None,
        "age_s": round(now - request.arrived, 1),
        "idle_s": round(now - generation.progress_at, 1),
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": outcome.cached_tokens,
        "tokens": len(generation.token_ids),
        "migrations": outcome.migrations,
    }
