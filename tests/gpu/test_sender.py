"""Sending out of device memory: packed on the device, and never before its kernels have written it."""

import numpy as np
import pytest
import torch

from prefill_node.compute import ForwardProgress
from prefill_node.plan import ChunkPlan
from prefill_node.pool_io import BUFFER_BYTES, DeviceSource, HostSource, SendBuffer
from tests.prefill_node.sending import NUM_PAGES, PAGE_SIZE, Sending, at_slots, wait_until
from transfer.checksum import verify
from transfer.choices import Transport

CUDA = torch.device("cuda")
LONG = 400_000_000
"""Clock cycles: a fifth of a second and more on any GPU."""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("slots", ["scattered", "contiguous"])
@pytest.mark.parametrize(("start", "stop"), [(0, NUM_PAGES * PAGE_SIZE), (3, 2399)])
def test_every_item_arrives_from_device_memory(transport: Transport, slots: str, start: int, stop: int) -> None:
    sending = Sending(transport, device=CUDA)
    chunk = sending.chunk(start=start, stop=stop, slots=slots)
    sent = sending.send(chunk)
    assert sent.error is None
    sending.check_bytes(chunk)
    assert len(sending.registered) == 1, "a processor reads device memory slowly: it goes over send buffers"
    assert not verify(sent.checksums, sending.destination().buffers, at_slots(chunk.block), NUM_PAGES * PAGE_SIZE)
    assert sending.sender.stop(timeout=5)


def test_a_layer_is_read_after_the_kernels_that_write_it() -> None:
    """sglang PR 30254: the NIC read KV that the compute stream had not finished writing."""
    sending = Sending("tcp", device=CUDA)
    warm_up = sending.send(sending.chunk())
    assert warm_up.error is None
    sending.channel("a").posted.clear()
    progress = ForwardProgress(CUDA)
    chunk = sending.chunk(progress=progress)
    computing = torch.cuda.Stream()
    with torch.cuda.stream(computing):
        for layer, buffers in enumerate(((0,), (1, 2))):
            torch.cuda._sleep(LONG)
            for buffer in buffers:
                sending.layers[buffer].add_(1.0)
            progress.layer_done(layer)
    sending.submit(chunk)
    assert not computing.query()
    wait_until(lambda: len(sending.channel("a").posted) > 0)
    assert sending.reports.get(timeout=10).error is None
    assert computing.query()
    sending.check_bytes(chunk)
    assert sending.sender.stop(timeout=5)


def test_the_rows_of_a_part_are_uploaded_once_for_all_layers() -> None:
    """They were uploaded for each layer, from memory that is not pinned, which waited for the device each time."""
    layers = [torch.rand(NUM_PAGES * PAGE_SIZE, 144, device=CUDA) for _ in range(8)]
    source = DeviceSource(layers)
    memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    plan = ChunkPlan(np.random.default_rng(0).permutation(NUM_PAGES), PAGE_SIZE, np.arange(2400), 0, 2400)
    first, second = plan.parts(1200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for part in (first, second):
            for buffer, layer in enumerate(layers):
                source.gather(buffer, part, SendBuffer(memory, memory.data_ptr()))
                packed = memory[: 1200 * 144 * 4].view(torch.float32).view(1200, 144)
                assert torch.equal(packed, layer.cpu()[part.items])
    assert [event.name.startswith("Memcpy HtoD") for event in profile.events()].count(True) == 2


def test_rows_are_uploaded_without_a_wait_and_go_with_their_part() -> None:
    source = DeviceSource([torch.rand(NUM_PAGES * PAGE_SIZE, 144, device=CUDA)])
    plan = ChunkPlan(np.arange(NUM_PAGES), PAGE_SIZE, np.arange(2400), 0, 2400)
    warm_up, part = plan.parts(1200)
    source._rows_of(warm_up)
    with torch.cuda.stream(source._stream):
        torch.cuda._sleep(LONG)
    rows = source._rows_of(part)
    assert not source._stream.query()
    source._stream.synchronize()
    assert rows.tolist() == part.items.tolist()
    assert part.uploaded == [rows]


def test_device_memory_has_the_same_checksum_as_host_memory() -> None:
    """What RDMA reads in place is hashed through a copy."""
    layers = [torch.rand(NUM_PAGES * PAGE_SIZE, 144, device=CUDA)]
    plan = ChunkPlan(np.random.default_rng(0).permutation(NUM_PAGES), PAGE_SIZE, np.arange(3, 2400), 3, 2400)
    [part] = plan.parts(10_000)
    host = HostSource([layer.cpu() for layer in layers])
    assert DeviceSource(layers).digest(0, part, 7, 2000) == host.digest(0, part, 7, 2000)
