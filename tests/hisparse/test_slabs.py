"""Slabs: as hot slots or as index pages, all layers' bytes of them lie in the slab, and nowhere else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.slabs import OwnedSlabs, SlabLayout, check_owners
from kvcache.extents import SlotAccountingError, SlotAllocator
from kvcache.layout import KVLayout

NUM_SLABS = 3


def bytes_of(view: torch.Tensor, numbers: list[int]) -> list[set[int]]:
    """For each layer, which bytes of memory these slots or pages of it take."""
    first = view.data_ptr()
    return [
        {byte - first for n in numbers for byte in range(layer[n].data_ptr(), layer[n].data_ptr() + layer[n].nbytes)}
        for layer in view
    ]


@given(*(st.integers(1, most) for most in (7, 7, 30, 9, 5)), st.sampled_from([1, 2, 4]))
def test_slots_and_pages_of_a_slab_take_its_bytes_alone(
    layers: int, index_layers: int, item_bytes: int, key_bytes: int, page_size: int, granule: int
) -> None:
    index_layers = min(layers, index_layers)
    layout = KVLayout(tuple(number * index_layers // layers for number in range(layers)), item_bytes, key_bytes)
    slab = SlabLayout(layout, page_size, granule)
    assert slab.slots % granule == 0
    memory = torch.zeros(NUM_SLABS * slab.num_bytes, dtype=torch.uint8)
    items, keys = slab.items(memory), slab.index_keys(memory)
    for number in range(NUM_SLABS):
        of_slab = set(range(number * slab.num_bytes, (number + 1) * slab.num_bytes))
        for view, count, stride in ((items, slab.slots, slab.slot_stride), (keys, slab.pages, slab.page_stride)):
            taken = bytes_of(view, list(range(number * stride, number * stride + count)))
            assert sum(map(len, taken)) == len(set().union(*taken)), "no byte belongs to two layers"
            assert set().union(*taken) <= of_slab
            assert sum(map(len, taken)) >= 0.99 * slab.num_bytes
    assert len(items[0]) == (NUM_SLABS - 1) * slab.slot_stride + slab.slots
    assert len(keys[0]) == (NUM_SLABS - 1) * slab.page_stride + slab.pages


@pytest.mark.parametrize(
    ("layers", "index_layers", "slots", "tokens"),
    [(61, 61, 336, 26 * 64), (62, 62, 272, 21 * 64), (78, 21, 128, 37 * 64)],
)
def test_slabs_of_published_models(layers: int, index_layers: int, slots: int, tokens: int) -> None:
    """In fp8: DeepSeek-V3.2 without its draft layer and with it, GLM-5.2."""
    layout = KVLayout(tuple(number * index_layers // layers for number in range(layers)), 656, 132)
    slab = SlabLayout.of(layout, 64, 4096)
    assert (slab.slots, slab.page_tokens) == (slots, tokens)


def test_a_table_names_the_parts_of_what_its_rows_own() -> None:
    allocator = SlotAllocator(8)
    table = torch.zeros(2, 12, dtype=torch.int64)
    owned = OwnedSlabs(allocator, table, -1, np.array([0, 16]), 100, most=6)
    owned.grow(0, 2)
    owned.grow(1, 1)
    owned.grow(0, 3)
    assert table.tolist() == [[0, 16, 100, 116, 300, 316] + 6 * [-1], [200, 216] + 10 * [-1]]
    owned.keep(0, 1, 2)
    assert table[0].tolist() == [100, 116, 300, 316] + 8 * [-1]
    assert (owned.used, owned.free, owned.counts[0]) == (3, 3, 2)
    taken = owned.take(3)
    assert taken is not None
    assert owned.take(1) is None, "six at most"
    with pytest.raises(SlotAccountingError, match="rows own 3 slabs, 6 are used"):
        check_owners(allocator, owned.owned())
    owned.replace(1, taken)
    check_owners(allocator, owned.owned())
    assert table[1, :6].tolist() == owned.locations(taken).tolist()
    for row in range(2):
        owned.release(row)
    assert (owned.used, allocator.used) == (0, 0)
    assert bool((table == -1).all())
