"""The KV tiers with their device in HBM: the coordinator's own tests, and what streams must wait for."""

import mmap
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hisparse.coordinator import StepPlaces
from hisparse.staging import CudaCopyStream
from hisparse.swap_in import Span, StagedKV
from kernels.swap_in import default_block_size
from kvcache.extents import HostSlots
from kvcache.host_pool import HostKVPool
from tests.gpu.test_sender import LONG
from tests.hisparse.test_coordinator import spoil_and_verify, violate_and_count, walk_and_leave_nothing
from tests.hisparse.tiers_harness import FORMAT, LAYOUT, TOP_K, Tiers, tiers

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("seed", range(3))
def test_after_any_walk_every_pool_is_exactly_as_full_as_at_start(seed: int) -> None:
    walk_and_leave_nothing(seed, turns=150, on="cuda:0")


def upload(values: object) -> torch.Tensor:
    """int64 on the device, without waiting for it."""
    return torch.as_tensor(values, dtype=torch.int64).pin_memory().to(CUDA, non_blocking=True)


def decode_one(t: Tiers, request_id: str, seed: int) -> StepPlaces:
    """Compute a token as a model does, but for attention, without waiting for the device."""
    assert not t.coordinator.append_tokens([request_id])
    places = t.coordinator.begin_step([request_id])
    newest = places.longest - 1
    own = Span(upload([newest]), upload([1]), 1)
    step = t.coordinator.cache(upload(places.rows), own.first, own, own, places.longest)
    for layer in range(LAYOUT.num_layers):
        step.append(layer, FORMAT.encode_items(upload([seed, layer, newest])[None]))
    for layer in range(LAYOUT.num_index_layers):
        step.append_index_keys(layer, FORMAT.encode_index_keys(upload([seed * 100 + layer, newest])[None]))
    for layer in range(LAYOUT.num_layers):
        step.swap_in(layer, upload([[-1]]))
    step.finish()
    return places


def stage(t: Tiers, request_id: str, seed: int, rows: torch.Tensor) -> HostSlots:
    """Begin to stage a prompt of nine tokens whose KV is one number everywhere, without waiting for the device."""
    slots = t.host.allocate(9)
    assert slots is not None
    kv = torch.zeros(LAYOUT.num_layers, 9, LAYOUT.item_bytes, dtype=torch.uint8, device=CUDA).add_(seed)
    keys = torch.zeros(LAYOUT.num_index_layers, 9, LAYOUT.index_key_bytes, dtype=torch.uint8, device=CUDA).add_(seed)
    t.coordinator.admit_request_into_staging(request_id, slots, StagedKV(list(kv), list(keys), rows, lambda: None), 9)
    return slots


def check_staged(t: Tiers, slots: HostSlots, seed: int) -> None:
    at = torch.from_numpy(slots.slots())
    assert bool((t.host.kv[:, at] == seed).all())
    assert bool((t.host.index_keys[:, at] == seed).all())


@contextmanager
def busy_tiers() -> Iterator[Tiers]:
    """Tiers with a running request "r" of 21 tokens of sequence 3, and a device that is busy from here on.

    Everything was done once before: the first use of a kernel, or of pinned memory of its size, may wait.
    """
    with tiers(on="cuda:0", verify=False) as t:
        assert t.admit("r", seed=3, num_tokens=20)
        t.coordinator.step_over(decode_one(t, "r", seed=3), {"r": 1})
        slots = stage(t, "warm", 1, torch.arange(9, device=CUDA).clone())
        torch.cuda.synchronize()
        assert t.coordinator.staging.poll().landed == ["warm"]
        t.host.release(slots)
        t.coordinator.counters()
        torch.cuda._sleep(LONG)
        yield t
        torch.cuda.synchronize()


def is_busy() -> bool:
    return not torch.cuda.current_stream().query()


def test_slots_change_hands_only_after_their_backup_has_landed() -> None:
    """Corruption under concurrent transfers: a backup that is still queued would land on the next owner's bytes."""
    with busy_tiers() as t:
        places = decode_one(t, "r", seed=3)
        assert is_busy()
        slots = t.coordinator.retract_request("r")
        used = t.host.used
        t.coordinator.release_host(slots)
        assert is_busy(), "nothing waits for the device"
        assert t.host.used == used, "nobody else gets them before the step is over"
        torch.cuda.synchronize()
        t.check_host_copy(slots, 3, 22)
        t.coordinator.step_over(places)
        assert t.coordinator.is_idle()


def test_an_illegal_address_from_a_stream_that_did_not_wait_for_another() -> None:
    """sglang PR 20343: cudaErrorIllegalAddress. A copy that started early would read rows that are not there yet."""
    rows = torch.full((9,), 2**40, device=CUDA)
    valid = torch.randperm(9, device=CUDA)
    with busy_tiers() as t:
        rows.copy_(valid)
        slots = stage(t, "s", 5, rows)
        assert is_busy(), "staging waits on the device, not here"
        assert t.coordinator.staging.poll().landed == []
        torch.cuda.synchronize()
        assert t.coordinator.staging.poll().landed == ["s"]
        check_staged(t, slots, 5)
        assert t.coordinator.admit_request_direct("s", slots, 9)
        t.coordinator.release_host(t.coordinator.retract_request("s"))


def test_a_second_prompt_is_staged_without_waiting_for_the_first() -> None:
    with busy_tiers() as t:
        all_slots = [stage(t, f"s{seed}", seed, torch.arange(9, device=CUDA)) for seed in (1, 2)]
        assert is_busy()
        torch.cuda.synchronize()
        assert t.coordinator.staging.poll().landed == ["s1", "s2"]
        for seed, slots in zip((1, 2), all_slots, strict=True):
            check_staged(t, slots, seed)


def test_a_copy_that_fails_is_over_and_says_why() -> None:
    stream = CudaCopyStream(CUDA)

    def broken() -> None:
        raise ValueError("no such page")

    event = stream.submit(broken)
    with pytest.raises(ValueError, match="no such page"):
        event.result()
    assert event.done()
    stream.shutdown()


def test_counters_are_read_without_waiting_for_a_step() -> None:
    with busy_tiers() as t:
        before = t.coordinator.counters()
        assert is_busy()
        assert t.coordinator.counters() == before


def test_a_step_queues_its_work_and_waits_for_nothing() -> None:
    with busy_tiers() as t:
        assert t.admit("s", seed=2, num_tokens=5)
        for request_id, seed in (("r", 3), ("s", 2)):
            decode_one(t, request_id, seed)
        assert is_busy()
        torch.cuda.synchronize()
        for request_id, seed, num_tokens in (("r", 3, 22), ("s", 2, 6)):
            slots = t.coordinator.retract_request(request_id)
            t.check_host_copy(slots, seed, num_tokens)


def test_the_configured_block_size_reaches_the_kernel() -> None:
    with tiers(on="cuda:0", swap_in_block_size=64) as t:
        assert t.coordinator._backend.block_size() == 64
        assert t.admit("r", seed=1, num_tokens=20)
        t.step(["r"], random.Random(0))
    with tiers(on="cuda:0") as t:
        assert t.coordinator._backend.block_size() == default_block_size(TOP_K)


def test_what_swap_in_cannot_serve_is_counted_and_copied_from_nowhere() -> None:
    violate_and_count(on="cuda:0")


@pytest.mark.parametrize("tier", ["host", "device"])
def test_verify_catches_a_resident_item_that_differs_from_its_host_copy(tier: str) -> None:
    spoil_and_verify(tier, on="cuda:0")


def test_a_pinned_pool_is_shared_with_processes_that_map_it() -> None:
    """What lands through another mapping of the memory is what the device reads."""
    pool = HostKVPool(LAYOUT, num_slots=300, pin=True, shareable=True)
    region = pool.shared()
    assert region is not None
    with open(f"/proc/self/fd/{region.fd}", "r+b") as memory:
        mapping = mmap.mmap(memory.fileno(), region.length)
    offset = pool.kv[1, 7].data_ptr() - region.base
    torch.frombuffer(mapping, dtype=torch.uint8, count=12, offset=offset).copy_(torch.arange(12))
    assert pool.kv.is_pinned()
    assert pool.index_keys.is_pinned()
    assert pool.kv[1].to(CUDA, non_blocking=True)[7].tolist() == list(range(12))
    pool.close()
    assert not pool.kv.is_pinned()
