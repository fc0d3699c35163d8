"""Sessions on several decode nodes, simulated: real caches, the real index and rule, an imagined clock and no KV."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS, BlockHashes, block_hashes
from control.cache_reports import CacheReports
from control.messages import CacheUpdate
from gateway.prefix_routing import PrefixIndex, ranked
from kvcache.block_cache import BlockCache

VOCAB = 32_000
HEARTBEAT_S = 1.0
TOKEN_S = 0.03
THINK_S = 20.0
SESSIONS_PER_S = 1.0

Tokens = npt.NDArray[np.int32]


class SimulatedGateway:
    """The index of a gateway that hears one node, and nothing is lost."""

    def __init__(self, node: str, index: PrefixIndex) -> None:
        self._node = node
        self._index = index

    def cache_serials(self) -> dict[str, int]:
        return {"gateway": self._index.serial(self._node)}

    def tell(self, addresses: Iterable[str], message: CacheUpdate) -> None:
        for _ in addresses:
            self._index.apply(self._node, message)


@dataclass
class SimulatedNode:
    """A decode node. cached: hashes of its blocks. load: tokens of its requests, reported with a heartbeat."""

    name: str
    cache: BlockCache
    reports: CacheReports
    cached: set[int] = field(default_factory=set)
    load: int = 0
    known_load: int = 0
    slots: "itertools.count[int]" = field(default_factory=itertools.count)

    def end(self, tokens: Tokens) -> None:
        """Cache what a request leaves."""
        blocks = len(tokens) // BLOCK_TOKENS
        missing = blocks - self.cache.find(tokens) // BLOCK_TOKENS
        self.cache.evict(missing - (self.cache.capacity - self.cache.blocks))
        self.cache.release(self.cache.insert(tokens, np.array([[next(self.slots)] for _ in range(blocks)]))[0])

    def stored(self, hashes: BlockHashes) -> None:
        self.cached |= set(hashes.tolist())
        self.reports.stored(hashes)

    def removed(self, hashes: BlockHashes) -> None:
        self.cached -= set(hashes.tolist())
        self.reports.removed(hashes)


@dataclass
class Outcome:
    """Tokens that requests found cached on their node, and that they would have found on the best one for each; loads
    added up over time."""

    requests: int = 0
    found: int = 0
    findable: int = 0
    fullest: float = 0.0
    mean: float = 0.0


class SessionSimulation:
    def __init__(self, nodes: int, blocks: int, seed: int) -> None:
        self.index = PrefixIndex(max_blocks=blocks)
        self.nodes = {name: self._node(name, blocks) for name in map(str, range(nodes))}
        self.outcome = Outcome()
        self._random = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._systems = [self._text(length) for length in (300, 800, 1500, 4000)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._now = 0.0
        self._open = 0

    def _node(self, name: str, blocks: int) -> SimulatedNode:
        cache = BlockCache(blocks, 1)
        node = SimulatedNode(name, cache, CacheReports(SimulatedGateway(name, self.index), cache.newest))
        cache.report_to(node, seed=0)
        return node

    def run(self, sessions: int) -> Outcome:
        """Play sessions to their ends."""
        start = 0.0
        self._open = sessions
        for _ in range(sessions):
            start += self._random.expovariate(SESSIONS_PER_S)
            turns = 1 + min(15, int(self._random.expovariate(1 / 5)))
            self._at(start, lambda turns=turns: self._turn(self._random.choice(self._systems), turns))
        self._heartbeat()
        while self._open:
            then, _, event = heapq.heappop(self._events)
            loads = [node.load for node in self.nodes.values()]
            self.outcome.fullest += (then - self._now) * max(loads)
            self.outcome.mean += (then - self._now) * sum(loads) / len(loads)
            self._now = then
            event()
        return self.outcome

    def _turn(self, history: Tokens, turns_left: int) -> None:
        prompt = np.concatenate([history, self._text(int(self._random.lognormvariate(5.5, 1.0)))])
        answer = int(self._random.uniform(50, 500))
        names = block_hashes(prompt)
        matched = self.index.matched(names)
        truly = {name: self._cached(node, names.tolist()) for name, node in self.nodes.items()}
        load = {node.name: node.known_load for node in self.nodes.values()}
        node = self.nodes[ranked(list(self.nodes), matched, load)[0]]
        tokens = len(prompt) + answer
        self.outcome.requests += 1
        self.outcome.found += truly[node.name]
        self.outcome.findable += max(truly.values())
        node.load += tokens
        node.known_load += tokens
        whole = np.concatenate([prompt, self._text(answer)])
        self._at(self._now + answer * TOKEN_S, lambda: self._end(node, whole, turns_left - 1))

    def _end(self, node: SimulatedNode, tokens: Tokens, turns_left: int) -> None:
        node.load -= len(tokens)
        node.end(tokens)
        if turns_left:
            then = self._now + self._random.expovariate(1 / THINK_S)
            self._at(then, lambda: self._turn(tokens, turns_left))
        else:
            self._open -= 1

    def _heartbeat(self) -> None:
        for node in self.nodes.values():
            node.reports.send(self._now)
            node.known_load = node.load
        self._at(self._now + HEARTBEAT_S, self._heartbeat)

    def _cached(self, node: SimulatedNode, names: list[int]) -> int:
        return BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(node.cached.__contains__, names))

    def _text(self, length: int) -> Tokens:
        return self._tokens.integers(0, VOCAB, length, dtype=np.int32)

    def _at(self, then: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (then, next(self._number), event))
