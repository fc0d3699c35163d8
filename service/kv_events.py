"""KV events, as vLLM publishes them (`--kv-events-config`): what this node's prefix cache gains and loses.

A batch is a message of a PUB socket: topic, number (8 bytes, big-endian) and msgpack of [time, events, rank]. A
subscriber that missed batches sends the number of the first to the ROUTER of `replay_endpoint`. It gets each later
batch that is still kept, and at the end the number -1. docs/operations/run.md has the fields of events.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Literal

import msgpack
import numpy as np
import structlog
import zmq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from base.block_hashes import BLOCK_TOKENS, BlockHashes, StoredBlocks
from base.errors import ProcessFailed, StartupError
from base.wire import first_error
from service.config import is_loopback

log = structlog.get_logger(__name__)

_MAX_REPLAY_BYTES = 256 << 20
_MAX_BATCH = 1024
"""Events of a batch. One that waits for others is not delayed: a batch has what is there."""
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_WILDCARDS = ("*", "0.0.0.0", "::")
Medium = Literal["CPU", "GPU"]
ZmqAddress = Annotated[str, Field(pattern=r"^(tcp://([\w.-]+|\*|\[[0-9a-fA-F:.]+\]):\d{1,5}|ipc://.+)$")]


class KVEventsConfig(BaseModel):
    """The JSON object of `--kv-events-config`, with vLLM's names.

    endpoint: bound if it is of this machine: loopback, a wildcard or ipc; connected to otherwise. buffer_steps: batches
    that are kept for replay. hwm: messages that wait for a slow subscriber before some are dropped. token_ids: without
    them events have hashes alone. array_like: events are arrays that begin with their type, else maps, as of vLLM 0.26.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: ZmqAddress = "tcp://127.0.0.1:5557"
    replay_endpoint: ZmqAddress | None = None
    buffer_steps: Annotated[int, Field(ge=1)] = 10_000
    hwm: Annotated[int, Field(ge=1)] = 100_000
    topic: str = ""
    token_ids: bool = True
    array_like: bool = True

    @property
    def endpoints(self) -> Iterator[str]:
        yield self.endpoint
        if self.replay_endpoint is not None:
            yield self.replay_endpoint


def parse_kv_events(text: str | None, insecure: bool) -> KVEventsConfig | None:
    """Read `--kv-events-config`; None if nothing is published. Raises StartupError for what is not as expected, and if
    other machines could read token ids, unless they may (`--insecure`)."""
    if text is None:
        return None
    try:
        config = KVEventsConfig.model_validate_json(text)
    except ValidationError as error:
        first = first_error(error)
        place = ".".join(map(str, first["loc"])) or text
        known = ", ".join(KVEventsConfig.model_fields)
        raise StartupError(f"--kv-events-config: {place}: {first['msg']}; the keys are {known}") from error
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    for endpoint in config.endpoints:
        if config.token_ids and not insecure and not _is_local(endpoint):
            raise StartupError(
                f"--kv-events-config: other machines reach {endpoint}, and events have the token ids of all clients' "
                'prompts: give a loopback address, or "token_ids": false for hashes alone, or --insecure'
            )
    return config


def _host(endpoint: str) -> str:
    """Of HOST:PORT after `tcp://`; brackets around an IPv6 address are left out."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _is_local(endpoint: str) -> bool:
    return endpoint.startswith("ipc://") or is_loopback(_host(endpoint))


def _of_rank(endpoint: str, rank: int) -> str:
    """Each rank's port is one above that of the rank before, as in vLLM."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{rank}" if rank else endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


class KVEventPublisher:
    """Publishes the events of one prefix cache, which calls `stored` and `removed` on its thread.

    A thread encodes and sends, and owns the sockets. It waits for nobody: what a subscriber does not take is dropped
    there, and the subscriber sees it by the numbers.
    """

    def __init__(self, config: KVEventsConfig, medium: Medium, rank: int = 0) -> None:
        """medium: where the cache's KV is. Raises StartupError if an endpoint is taken."""
        self._config, self._medium, self._rank = config, medium, rank
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.IPV6, int(any("[" in endpoint for endpoint in config.endpoints)))
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, config.hwm)
        self._replayer = self._context.socket(zmq.ROUTER)
        # A whole replay fits, however slowly it is read.
        self._replayer.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
        try:
            endpoint = _of_rank(config.endpoint, rank)
            is_here = _is_local(endpoint) or _host(endpoint) in _WILDCARDS
            (self._publisher.bind if is_here else self._publisher.connect)(endpoint)
            if config.replay_endpoint is not None:
                endpoint = _of_rank(config.replay_endpoint, rank)
                self._replayer.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(
                f"--kv-events-config: cannot use {endpoint}: {error.strerror}; choose another"
            ) from error
        self._events: queue.SimpleQueue[StoredBlocks | BlockHashes] = queue.SimpleQueue()
        """What came into the cache, and the hashes of what left it."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._failure: BaseException | None = None
        self._sequence = 0
        self._blocks = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stored(self, blocks: StoredBlocks) -> None:
        tokens = np.array(blocks.tokens if self._config.token_ids else (), dtype=np.int32)
        self._put(StoredBlocks(blocks.hashes, tokens, blocks.parent, blocks.salt))

    def removed(self, hashes: BlockHashes) -> None:
        self._put(hashes)

    def check(self) -> None:
        """Raise ProcessFailed if the thread has ended by itself: subscribers would miss events unnoticed."""
        if self._failure is not None:
            raise ProcessFailed(f"KV events are not published any more: {self._failure!r}") from self._failure

    def close(self) -> None:
        """Publish what was handed over, and close. Idempotent."""
        if self._thread.is_alive():
            self._stopping = True
            os.eventfd_write(self._wakeup, 1)
            self._thread.join()
        if not self._context.closed:
            self._context.destroy(linger=100)
            os.close(self._wakeup)

    def _put(self, event: StoredBlocks | BlockHashes) -> None:
        self._events.put(event)
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            # Subscribers forget what an earlier process at this address had.
            self._publish([{"type": "AllBlocksCleared"}])
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            poller.register(self._replayer, zmq.POLLIN)
            while not self._stopping or not self._events.empty():
                if dict(poller.poll()).get(self._replayer):
                    self._replay(self._replayer.recv_multipart())
                while events := list(self._waiting()):
                    self._publish(events)
        except BaseException as error:
            log.critical("KV events are not published any more", error=repr(error))
            self._failure = error

    def _waiting(self) -> Iterator[Mapping[str, object]]:
        """The next batch."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        for _ in range(_MAX_BATCH):
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            yield self._stored(event) if isinstance(event, StoredBlocks) else self._removed(event)

    def _stored(self, blocks: StoredBlocks) -> Mapping[str, object]:
        self._blocks += len(blocks.hashes)
        event: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": blocks.hashes.tolist(),
            "parent_block_hash": blocks.parent,
            "token_ids": blocks.tokens.tolist(),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
        }
        if blocks.salt and blocks.parent is None and self._config.token_ids:
            event["extra_keys"] = [(blocks.salt,), *[None] * (len(blocks.hashes) - 1)]
        return event

    def _removed(self, hashes: BlockHashes) -> Mapping[str, object]:
        self._blocks -= len(hashes)
        if not self._blocks:
            return {"type": "AllBlocksCleared"}
        return {"type": "BlockRemoved", "block_hashes": hashes.tolist(), "medium": self._medium}

    def _publish(self, events: list[Mapping[str, object]]) -> None:
        as_sent = [list(event.values()) for event in events] if self._config.array_like else events
        payload: bytes = msgpack.packb([time.time(), as_sent, self._rank])
        number, self._sequence = self._sequence, self._sequence + 1
        self._publisher.send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload])
        if self._config.replay_endpoint is None:
            return
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > _MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, request: list[bytes]) -> None:
        """Answer (identity, empty, first number) with what is kept from there on."""
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a replay of KV events is asked for with its first number, 8 bytes", frames=len(request))
            return
        identity, empty, first = request
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                self._replayer.send_multipart([identity, empty, number.to_bytes(8, "big"), payload])
        self._replayer.send_multipart([identity, empty, _END_OF_REPLAY, b""])
