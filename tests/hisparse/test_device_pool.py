"""What a row of the device tier owns as its request grows."""

import pytest
import torch

from hisparse.device_pool import DeviceKVPool
from kvcache.layout import KVLayout

HOT, CONTEXT = 10, 40


def pool(window: int, num_slots: int = 100, context: int = CONTEXT) -> DeviceKVPool:
    return DeviceKVPool(KVLayout((0,), 8, 8), num_slots, 40, 4, 2, context, HOT, "cpu", window)


@pytest.mark.parametrize("window", [1, 2, 4, 6])
@pytest.mark.parametrize("num_tokens", range(CONTEXT + 1))
def test_a_row_that_may_be_long_owns_the_buffer_and_the_window(num_tokens: int, window: int) -> None:
    device = pool(window)
    row = device.allocate_row(num_tokens)
    assert row is not None
    may_be_long = num_tokens - 1 + window > HOT
    assert device.slots_for(num_tokens) == (HOT + window if may_be_long else num_tokens)
    assert device.used_slots >= device.slots_for(num_tokens)
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
    device = pool(window=4, num_slots=9)
    assert device.allocate_row(5) == 0
    assert device.room(0) == 7
    assert not device.grow(0, 8)
    assert device.used_slots == 9
