"""The prefill side of the overlap measurement: a real prefill node over a model that only sleeps."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from benchmarks.transfer.cases import Protocol
from benchmarks.transfer.overlap_model import SleepingModel, spec
from benchmarks.transfer.pools import fill
from control.messages import Message, Peer
from engine.chunked import ChunkedPrefill
from kvcache.paged_pool import PagedKVPool
from model.sparse_model import SparseModel
from prefill_node.attempt import HeldAttempt
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.offer import Offer
from prefill_node.orders import OF_FIRST
from prefill_node.planner import PrefillPlanner
from prefill_node.worker import PrefillWorker
from ranks.executor import Executor
from ranks.group import SingleRank
from service.checkpoint import identity_of
from service.config import NodeConfig
from service.shell import NodeShell
from transfer.choices import ChecksumMode
from transfer.transports import Transports

PAGE_SIZE = 64
CHUNK_TOKENS = 2048
_CPU = torch.device("cpu")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PrefillSide:
    """A prefill node that serves whoever knows its address. The model's pace may be changed between requests."""

    peer: Peer
    model: SleepingModel


@contextmanager
def prefill_side(
    host: str, protocol: Protocol, tokens: int, ib_device: str, checksums: ChecksumMode
) -> Iterator[PrefillSide]:
    """A node with room for one prompt of `tokens` tokens, in pages that lie in no order, for as long as the context."""
    config = NodeConfig(model_path=Path(), host=host, transfer_protocol=protocol.value, ib_device=ib_device)
    with ExitStack() as at_end:
        shell: NodeShell[tuple[Peer, Message]] = NodeShell("prefill", config)
        at_end.callback(shell.close)
        pool = _scattered_pool(tokens)
        transports = Transports(host, config.transfer_protocol, ib_device)
        transports.register(pool.get_contiguous_buf_infos())
        at_end.callback(transports.unregister, pool.get_contiguous_buf_infos())
        model = SleepingModel()
        prefill: ChunkedPrefill[HeldAttempt] = ChunkedPrefill(pool, CHUNK_TOKENS)
        shape = spec(tokens)
        ranks = SingleRank(_CPU)
        new_worker = partial(
            PrefillWorker,
            cast(SparseModel, model),
            pool,
            transports,
            shell.control.silence,
            checksums,
            ranks.connect().gather,
            ranks,
        )
        executor = Executor(ranks, new_worker, OF_FIRST, partial(shell.inbox.put, None))
        at_end.callback(executor.close, timeout=_TIMEOUT_S)
        offer = Offer(identity_of(shape), transports.offered, max_tokens=tokens, vocab_size=shape.vocab_size)
        planner = PrefillPlanner(prefill, executor, offer, shell.metrics, _TIMEOUT_S, "never")
        endpoint = PrefillEndpoint(shell, planner, ranks)
        loop = threading.Thread(target=endpoint.run, name="prefill-node")
        shell.control.start()
        loop.start()
        at_end.callback(loop.join)
        at_end.callback(shell.inbox.put, None)
        at_end.callback(shell.lifecycle.end)
        yield PrefillSide(shell.control.me, model)


def _scattered_pool(tokens: int) -> PagedKVPool:
    """A pool whose free pages come in random order, full of bytes that differ everywhere."""
    pool = PagedKVPool(spec(tokens).kv_layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, _CPU)
    for number, tensor in enumerate((pool.kv, pool.index_keys)):
        fill(tensor, seed=number)
    pages = pool.allocate(tokens)
    assert pages is not None
    pool.free(pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(0)).numpy()])
    return pool
