"""KV events, decoded by vLLM's published definitions: a subscriber's table is the node's cache."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from base.block_hashes import BLOCK_TOKENS, StoredBlocks, block_hashes
from base.errors import ProcessFailed, StartupError
from cli.serve import free_port
from kvcache.block_cache import BlockCache
from service.kv_events import KVEventPublisher, parse_kv_events
from tests.e2e.cluster import wait_until
from tests.starting import starting

FIELDS: Mapping[str, str] = {
    "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name | extra_keys",
    "BlockRemoved": "block_hashes medium |",
    "AllBlocksCleared": "|",
}
"""In order, of vllm/distributed/kv_events.py. What is behind the bar has a default, and may be left out."""
Event = dict[str, Any]
Table = dict[int, tuple[int | None, tuple[int, ...], str]]
"""By hash: the parent's hash, the tokens, and the salt of a first block."""


def decoded(payload: bytes) -> tuple[float, list[Event], int]:
    """As msgspec reads it: an array by the order of the fields, or a map by their names."""
    at, events, rank = msgpack.unpackb(payload)
    return at, [event if isinstance(event, dict) else named(*event) for event in events], rank


def named(kind: str, *values: Any) -> Event:
    required, optional = (part.split() for part in FIELDS[kind].split("|"))
    assert len(required) <= len(values) <= len(required + optional)
    return {"type": kind, **dict(zip(required + optional, values, strict=False))}


class Subscriber:
    """Keeps a table by the events. loses: how often it loses a batch, as PUB does to a slow reader."""

    def __init__(self, publish: str, replay: str | None = None, loses: float = 0.0, topic: str = "") -> None:
        self.table: Table = {}
        self.events: list[Event] = []
        self.ranks: set[int] = set()
        self.replayed = 0
        self._next, self._loses, self._random = 0, loses, random.Random(3)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self._socket.connect(publish)
        self._replay = self._context.socket(zmq.DEALER)
        if replay is not None:
            self._replay.connect(replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> int:
        """Take what has arrived. Returns how many batches it knows."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            if self._random.random() >= self._loses:
                self._take(int.from_bytes(number, "big"), payload)
        return self._next

    def catch_up(self) -> None:
        """Ask for every batch from the first that is missing."""
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(10_000)
            _, number, payload = self._replay.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return
            self.replayed += 1
            self._apply(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self.catch_up()
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return
        assert number == self._next
        self._next += 1
        _, events, rank = decoded(payload)
        self.ranks.add(rank)
        self.events += events
        for event in events:
            self._apply_event(event)

    def _apply_event(self, event: Event) -> None:
        match event:
            case {"type": "AllBlocksCleared"}:
                self.table.clear()
            case {"type": "BlockRemoved", "block_hashes": hashes}:
                for name in hashes:
                    del self.table[name]
            case {"type": "BlockStored", "block_hashes": hashes, "token_ids": ids, "block_size": size}:
                parent = event["parent_block_hash"]
                assert parent is None or parent in self.table
                salts = event.get("extra_keys") or [None] * len(hashes)
                for at, (name, keys) in enumerate(zip(hashes, salts, strict=True)):
                    assert name not in self.table
                    self.table[name] = parent, tuple(ids[at * size : (at + 1) * size]), keys[0] if keys else ""
                    parent = name


def table_of(cache: BlockCache) -> Table:
    """The same, of the cache's own tables."""
    name_of = {number: name for name, number in cache._number_of.items()}
    return {
        name: (
            name_of.get(int(cache._parents[number])),
            tuple(cache._tokens[number].tolist()),
            cache._salt_of.get(number, ""),
        )
        for name, number in cache._number_of.items()
    }


def use(cache: BlockCache, steps: int, seed: int = 0) -> None:
    """Insert prompts that share prefixes, some under a salt, and evict for them; now and then all."""
    rng = random.Random(seed)
    for step in range(steps):
        tokens = np.repeat([rng.randrange(3) for _ in range(rng.randrange(1, 8))], BLOCK_TOKENS)
        salt = rng.choice(["", "", "alice"])
        blocks = len(tokens) // BLOCK_TOKENS
        missing = blocks - cache.find(tokens, salt) // BLOCK_TOKENS
        cache.evict(cache.capacity if rng.random() < 0.02 else missing - (cache.capacity - cache.blocks))
        slots = np.arange(step * 100, step * 100 + blocks)[:, None]
        cache.release(cache.insert(tokens, slots, salt)[0])


Publish = Callable[..., tuple[KVEventPublisher, list[str]]]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """A function that publishes, on loopback: it and its two endpoints."""
    made: list[KVEventPublisher] = []

    def start(rank: int = 0, **options: object) -> tuple[KVEventPublisher, list[str]]:
        ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        given = {"enable_kv_cache_events": True, "endpoint": ends[0], "replay_endpoint": ends[1], **options}
        config = parse_kv_events(json.dumps(given), insecure=False)
        assert config is not None
        made.append(KVEventPublisher(config, "CPU", rank))
        made[-1].start()
        return made[-1], ends

    yield start
    for one in made:
        one.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    with starting(Subscriber, Subscriber.close) as start:
        yield start


@pytest.mark.parametrize("array_like", [True, False])
@pytest.mark.parametrize("loses", [0.0, 0.4])
def test_a_subscriber_rebuilds_the_cache(
    publish: Publish, subscribe: Callable[..., Subscriber], loses: float, array_like: bool
) -> None:
    publisher, ends = publish(array_like=array_like, topic="kv-events")
    subscriber = subscribe(*ends, loses=loses, topic="kv-events")
    cache = BlockCache(20, 1)
    cache.report_to(publisher, seed=5)
    for round_ in range(30):
        use(cache, 10, seed=round_)
        subscriber.read()
    wait_until(lambda: (publisher._events.empty(), subscriber.catch_up(), subscriber.table == table_of(cache))[2])
    assert {event["type"] for event in subscriber.events} == set(FIELDS)
    assert {event.get("medium", "CPU") for event in subscriber.events} == {"CPU"}
    assert subscriber.ranks == {0}
    if loses:
        assert subscriber.replayed


def test_who_comes_late_gets_what_is_kept(publish: Publish, subscribe: Callable[..., Subscriber]) -> None:
    publisher, ends = publish(buffer_steps=3)
    for number in range(6):
        tokens = np.full(BLOCK_TOKENS, number)
        publisher.stored(StoredBlocks(block_hashes(tokens), tokens, None, ""))
        wait_until(lambda number=number: publisher._sequence == number + 2)
    subscriber = subscribe(*ends)
    subscriber._next = 4
    subscriber.catch_up()
    assert (subscriber.replayed, subscriber._next) == (3, 7)


def test_the_kept_batches_are_bounded_in_bytes(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.kv_events._MAX_REPLAY_BYTES", 2000)
    publisher, _ = publish()
    cache = BlockCache(20, 1)
    cache.report_to(publisher, seed=0)
    use(cache, 100)
    wait_until(lambda: publisher._events.empty())
    publisher.close()
    assert sum(len(payload) for _, payload in publisher._kept) == publisher._kept_bytes <= 2000


def test_hashes_alone_are_published_without_token_ids(publish: Publish, subscribe: Callable[..., Subscriber]) -> None:
    publisher, ends = publish(token_ids=False, rank=0)
    subscriber = subscribe(*ends)
    cache = BlockCache(20, 1)
    cache.report_to(publisher, seed=5)
    cache.insert(np.arange(2 * BLOCK_TOKENS), np.arange(2)[:, None], "alice")
    wait_until(lambda: (subscriber.catch_up(), subscriber.table)[1])
    [stored] = [event for event in subscriber.events if event["type"] == "BlockStored"]
    assert (stored["token_ids"], stored.get("extra_keys")) == ([], None)
    assert subscriber.table.keys() == table_of(cache).keys()


def test_another_machine_is_connected_to(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.kv_events._is_local", lambda endpoint: False)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        publisher, _ = publish(endpoint=f"tcp://127.0.0.1:{port}", token_ids=False)
        tokens = np.zeros(BLOCK_TOKENS, dtype=np.int32)
        while not socket.poll(20):  # it is not connected yet
            publisher.stored(StoredBlocks(block_hashes(tokens), tokens, None, ""))
        topic, _, payload = socket.recv_multipart()
        assert (topic, decoded(payload)[2]) == (b"", 0)


def test_each_rank_has_the_next_port_and_says_its_number(
    publish: Publish, subscribe: Callable[..., Subscriber]
) -> None:
    _, ends = publish(rank=1)
    subscriber = subscribe(*(f"{end.rpartition(':')[0]}:{int(end.rpartition(':')[2]) + 1}" for end in ends))
    subscriber.catch_up()
    assert (subscriber.ranks, subscriber.events) == ({1}, [{"type": "AllBlocksCleared"}])


def test_a_malformed_replay_request_ends_nothing(publish: Publish, subscribe: Callable[..., Subscriber]) -> None:
    _, ends = publish()
    subscriber = subscribe(*ends)
    for frames in ([b"x"], [b"", b"123"], [b"", b"1", b"2"]):
        subscriber._replay.send_multipart(frames)
    subscriber.catch_up()
    assert subscriber.replayed == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"endpoint": "tcp://*:5557"}, "other machines reach tcp"),
        ({"replay_endpoint": "tcp://10.0.0.1:5557"}, "hashes alone, or --insecure"),
        ({"endpoint": "udp://127.0.0.1:5557"}, "endpoint: String should match pattern"),
        ({"max_queue_size": 5}, "max_queue_size: Extra inputs"),
        ({"buffer_steps": 0}, "buffer_steps: Input should be greater"),
        ("{", "Invalid JSON"),
    ],
)
def test_what_cannot_be_published_is_refused(given: object, said: str) -> None:
    text = given if isinstance(given, str) else json.dumps({"enable_kv_cache_events": True, **given})  # type: ignore[dict-item]
    with pytest.raises(StartupError, match=said):
        parse_kv_events(text, insecure=False)


def test_other_machines_may_read_hashes_or_all_if_told_so() -> None:
    far: dict[str, object] = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    assert parse_kv_events(json.dumps({**far, "token_ids": False}), insecure=False) is not None
    assert parse_kv_events(json.dumps(far), insecure=True) is not None
    assert parse_kv_events(json.dumps({**far, "enable_kv_cache_events": False}), insecure=False) is None
    assert parse_kv_events(None, insecure=False) is None


def test_an_endpoint_that_is_taken_is_said(publish: Publish) -> None:
    _, ends = publish()
    with pytest.raises(StartupError, match=f"cannot use {ends[0]}: Address already in use"):
        publish(endpoint=ends[0])


def test_a_node_that_cannot_publish_any_more_ends(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = publish()
    wait_until(lambda: publisher._sequence == 1)
    publisher.check()
    monkeypatch.setattr(publisher, "_removed", lambda hashes: 1 / 0)
    publisher.removed(block_hashes(np.zeros(BLOCK_TOKENS, dtype=np.int32)))
    publisher._thread.join(10)
    with pytest.raises(ProcessFailed, match="not published any more"):
        publisher.check()
