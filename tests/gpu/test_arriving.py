"""A pass on the device that begins while layers of its prefix are read computes what it computes behind all of them."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.loader import load_model
from model.passes import PrefillChunk
from model.tiny import write_tiny_checkpoint
from prefill_node.arrival import AwaitedPrefixes, PrefixArrival
from prefill_node.fetch import RunningFetch
from prefill_node.orders import TransferReport
from prefill_node.pool_io import DeviceSink, KVSink, SendRings
from tests.gpu.test_fetch import CUDA, PAGE_SIZE, fetch_of
from tests.prefill_node.sending import LateChannel
from transfer.planner import Descriptors
from transfer.writer import Outcome, Pipeline

PREFIX, TOKENS = 1024, 1280
PROMPT = torch.randint(0, 256, (TOKENS + 1,), generator=torch.Generator().manual_seed(5))
PAGES = np.random.default_rng(0).permutation(TOKENS // PAGE_SIZE)


class SlowChannel(LateChannel):
    """So slow that the pass waits for most layers."""

    def _land(self, batch: Descriptors) -> Outcome:
        time.sleep(0.005)
        return super()._land(batch)


def new_sink(pool: PagedKVPool) -> KVSink:
    return DeviceSink([*pool.kv, *pool.index_keys], SendRings(pin=True, register=lambda _: None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_what_it_is_behind_a_whole_prefix(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v32", seed=1, layers=8)
    model = load_model(tmp_path, dtype, CUDA)
    layout = model.spec.kv_layout
    expected, found = (PagedKVPool(layout, len(PAGES), PAGE_SIZE, CUDA) for _ in range(2))
    behind = PrefillChunk.of(PROMPT, PREFIX, TOKENS, PagedSequence(expected, PAGES))
    model.prefill([PrefillChunk.of(PROMPT, 0, PREFIX, PagedSequence(expected, PAGES))])
    model.prefill([behind])
    rows = PagedSequence(expected, PAGES).rows(0, PREFIX)
    there = [layer[rows].cpu() for layer in (*expected.kv, *expected.index_keys)]
    arrival = PrefixArrival(layout.layer_of_buffer)
    fetch = fetch_of(there, np.arange(PREFIX), 0, PAGES, arrival)
    reports: list[TransferReport] = []

    def read() -> None:
        reports.append(RunningFetch(fetch, Pipeline(SlowChannel("tcp")), new_sink(found), PAGE_SIZE).run(lambda: True))
        arrival.end()

    reading = threading.Thread(target=read)
    reading.start()
    awaited = AwaitedPrefixes({0: arrival}, num_chunks=1, patience=60.0)
    behind = PrefillChunk.of(PROMPT, PREFIX, TOKENS, PagedSequence(found, PAGES))
    model.prefill([behind], awaited.wait)
    reading.join()
    assert (reports[0].error, awaited.void) == (None, set())
    for mine, theirs in ((found.kv, expected.kv), (found.index_keys, expected.index_keys)):
        torch.testing.assert_close(mine.view(dtype).float(), theirs.view(dtype).float(), rtol=1e-4, atol=1e-4)
