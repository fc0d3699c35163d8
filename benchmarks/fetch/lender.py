"""A process with a host pool that lends prefixes, as a decode node does: digests first, then slots are named."""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.program import uninterrupted
from control.messages import Destination, ModelIdentity
from decode_node.pools import destination_of
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout
from transfer.checksum import digests
from transfer.choices import TransferProtocol
from transfer.memory import Checksums
from transfer.transports import Transports

_EXTENT = 2048
"""Slots that lie together; the order of these pieces is random."""


class Lender:
    """Starts the process, with random KV for so many tokens. Context manager: the process ends with it."""

    def __init__(self, layout: KVLayout, num_tokens: int, protocol: TransferProtocol, identity: ModelIdentity) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_lend, args=(there, layout, num_tokens, protocol, identity), daemon=True)
        with uninterrupted():
            self._process.start()
        self.destination: Destination = self._here.recv()

    def lend(self, num_tokens: int) -> tuple[np.ndarray, Checksums]:
        """The slots of the first so many positions, int64 [n], and the digests of what lies there, made now."""
        self._here.send(num_tokens)
        slots, checksums = self._here.recv()
        return slots, checksums

    def __enter__(self) -> "Lender":
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send(None)
        self._process.join()


def _lend(
    pipe: Connection, layout: KVLayout, num_tokens: int, protocol: TransferProtocol, identity: ModelIdentity
) -> None:
    transports = Transports("127.0.0.1", protocol)
    pool = HostKVPool(layout, num_tokens, pin=False, shareable=protocol == "shm")
    for tensor in (pool.kv, pool.index_keys):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    destination = destination_of(pool, transports, identity)
    transports.register(destination.buffers)
    starts = np.random.default_rng(0).permutation(np.arange(0, num_tokens, _EXTENT))
    slots = np.concatenate([np.arange(start, min(start + _EXTENT, num_tokens)) for start in starts])
    pipe.send(destination)
    while (wanted := pipe.recv()) is not None:
        pipe.send((slots[:wanted], Checksums.of(list(digests(destination.buffers, slots[:wanted], 0)))))
    transports.unregister(destination.buffers)
    pool.close()
