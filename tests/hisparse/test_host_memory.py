"""Host memory: zeroed, aligned, and the same bytes for a process that maps it."""

import mmap
import os

import pytest
import torch

from hisparse.host_memory import HostMemory
from hisparse.host_pool import HostKVPool
from hisparse.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, index_layer_of=(0, 0, 1), item_dim=5, index_dim=3, dtype=torch.float32)


@pytest.mark.parametrize("shareable", [True, False])
def test_layers_of_a_pool_are_zeroed_and_do_not_overlap(shareable: bool) -> None:
    pool = HostKVPool(LAYOUT, num_slots=300, pin=False, shareable=shareable)
    assert not pool.kv.any()
    assert not pool.index_keys.any()
    pool.kv.fill_(1)
    pool.index_keys.fill_(2)
    assert bool((pool.kv == 1).all())
    ptrs, lengths, _ = pool.get_contiguous_buf_infos()
    assert ptrs[0] % mmap.PAGESIZE == ptrs[3] % mmap.PAGESIZE == 0
    ends = [ptr + length for ptr, length in zip(ptrs, lengths, strict=True)]
    assert all(end <= ptr for end, ptr in zip(ends, ptrs[1:], strict=False))


def test_a_shared_pool_is_the_same_memory_by_its_descriptor() -> None:
    pool = HostKVPool(LAYOUT, num_slots=300, pin=False, shareable=True)
    pool.kv[1, 7] = torch.arange(5)
    region = pool.shared()
    assert region is not None
    assert os.readlink(f"/proc/self/fd/{region.fd}").startswith(f"/memfd:{region.name} ")
    with open(f"/proc/self/fd/{region.fd}", "r+b") as memory:
        mapping = mmap.mmap(memory.fileno(), region.length)
    offset = pool.kv[1, 7].data_ptr() - region.base
    mapped = torch.frombuffer(mapping, dtype=torch.float32, count=5, offset=offset)
    assert mapped.tolist() == [0, 1, 2, 3, 4]
    mapped[2] = 9
    assert pool.kv[1, 7].tolist() == [0, 1, 9, 3, 4]


def test_a_pool_that_was_closed_or_not_made_for_it_is_not_shared() -> None:
    assert HostKVPool(LAYOUT, num_slots=3, pin=False).shared() is None
    pool = HostKVPool(LAYOUT, num_slots=3, pin=False, shareable=True)
    region = pool.shared()
    assert region is not None
    pool.close()
    assert pool.shared() is None
    assert not os.path.exists(f"/proc/self/fd/{region.fd}")
    assert not pool.kv.any(), "the memory stays as long as its tensors"


def test_no_slots_are_no_error() -> None:
    assert HostMemory(0, shareable=True).tensor(0, (2, 0, 3), torch.float32).shape == (2, 0, 3)
