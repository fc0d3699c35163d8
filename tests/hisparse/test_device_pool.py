"""What a row of the device tier owns as its request grows."""

import pytest
import torch

from hisparse.device_pool import DeviceKVPool
from kvcache.layout import KVLayout

HOT, CONTEXT = 10, 40


def pool(window: int, num_slabs: int = 100, context: int = CONTEXT, max_hot_slabs: int | None = None) -> DeviceKVPool:
    """A slab is one hot slot, or a page with the index key of one token."""
    return DeviceKVPool(KVLayout((0,), 8, 8), num_slabs, 1, 2, context, HOT, "cpu", window, max_hot_slabs)


@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("num_tokens", range(CONTEXT + 1))
def test_a_row_that_may_be_long_owns_the_buffer_and_the_window(num_tokens: int, window: int) -> None:
    device = pool(window)
    row = device.allocate_row(num_tokens)
    assert row is not None
    may_be_long = num_tokens - 1 + window > HOT
    assert device.used_slots == (HOT + window if may_be_long else num_tokens)
    assert device.room(row) >= num_tokens
    if num_tokens:
        newest = torch.tensor([num_tokens - 1])
        hot = device.window_hot(torch.tensor([row]), newest, newest + torch.arange(window))
        assert bool((device.hot_slots(row, hot) >= 0).all() if may_be_long else (hot[0] == newest)[0])


def test_the_tokens_of_a_window_lie_after_those_before_it_or_behind_the_buffer() -> None:
    device = pool(window=4)
    newest = torch.tensor([[6], [7]])
    assert device.window_hot(torch.tensor([[0], [1]]), newest, newest + torch.arange(4)).tolist() == [
        [6, 7, 8, 9],
        [10, 11, 12, 13],
    ]


def test_a_row_with_a_part_of_the_buffer_has_no_room_to_be_long() -> None:
    device = pool(window=4, num_slabs=7 + 7)
    assert device.allocate_row(7) == 0
    assert device.room(0) == 7
    assert not device.grow(0, 8)
    assert (device.used_slots, device.usage) == (7, 1)


def test_slabs_of_pages_become_hot_slots_and_slots_become_pages() -> None:
    device = pool(window=1, num_slabs=2 * (HOT + 1) + 2 * 15)
    first, second = device.allocate_row(15), device.allocate_row(15)
    assert first is not None
    assert second is not None
    assert not device.can_take(1, 15)
    device.free_row(second)
    taken = device.take(15 + HOT + 1)
    assert taken is not None
    assert device.take(1) is None
    device.make_resident(first, taken)
    device.check_integrity()
    assert device.room(first) == 15
    assert not device.has_room_for(15), "a page stays free for each row that may grow"
    assert device.has_room_for(14)
    device.make_long(first, 15)
    second = device.allocate_row(15)
    assert second is not None
    device.check_integrity()
    for row in (first, second):
        device.free_row(row)
    assert device._slabs.used == 0


def test_no_more_slabs_become_hot_slots_than_may() -> None:
    device = pool(window=1, max_hot_slabs=HOT + 3)
    assert device.allocate_row(20) == 0
    assert device.free_slots == 2
    assert device.take(3) is None
    assert not device.grow(1, 3)
    assert device.grow(1, 2)
    assert device.usage == 1
