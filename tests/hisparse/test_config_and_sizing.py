"""A configuration that cannot be served is refused at start, in words (sglang 22970)."""

import math
import re
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from base.errors import StartupError
from hisparse.config import parse_config
from hisparse.sizing import GIB, Sizes, describe, plan_sizes
from hisparse.tiers import build_tiers, largest_buffer
from kvcache.layout import KVLayout

LAYOUT = KVLayout(index_layer_of=(0, 1, 1, 2), item_bytes=1152, index_key_bytes=256)
"""A slab has 32 hot slots, or 3 pages: 192 tokens."""


def plan(
    text: str | None,
    *,
    device_gib: float = 64,
    host_gib: float = 512,
    context: int = 8192,
    max_device_slots: int | None = None,
    window: int = 1,
    running: int = 16,
    fill_memory: bool = False,
    top_k: int = 256,
) -> Sizes:
    return plan_sizes(
        parse_config(text, model_top_k=top_k),
        LAYOUT,
        max_running_requests=running,
        context_length=context,
        index_page_size=64,
        available_host_bytes=int(host_gib * GIB),
        available_device_bytes=int(device_gib * GIB),
        max_device_slots=max_device_slots,
        window=window,
        fill_memory=fill_memory,
        largest_buffer=2048 if fill_memory else 0,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, found [1]"),
        (
            '{"hot_size": 3}',
            "unknown key 'hot_size', the known ones are device_buffer_size, host_pool_gib, "
            "host_to_device_ratio, resident_rows, swap_in_block_size, top_k",
        ),
        ('{"device_buffer_size": 512.5}', "device_buffer_size must be an integer, found 512.5"),
        ('{"device_buffer_size": true}', "device_buffer_size must be an integer, found true"),
        ('{"host_pool_gib": "8"}', 'host_pool_gib must be a number, found "8"'),
        ('{"host_to_device_ratio": null}', "host_to_device_ratio must be a number, found null"),
        ('{"host_to_device_ratio": 0}', "host_to_device_ratio must be positive, found 0"),
        ('{"host_pool_gib": Infinity}', "host_pool_gib must be positive, found inf"),
        ('{"host_to_device_ratio": 4, "host_pool_gib": 8}', "not both"),
        ('{"device_buffer_size": 255}', "must be at least top_k (256)"),
        ('{"device_buffer_size": 32768}', "at most 32767, found 32768"),
        ('{"top_k": 128}', "top_k is 128, but the model selects 256"),
        ('{"swap_in_block_size": 100}', "power of two from 32 to 1024, found 100"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(text: str, message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        parse_config(text, model_top_k=256)


def test_defaults_come_from_the_model() -> None:
    config = parse_config(None, model_top_k=256)
    assert (config.top_k, config.device_buffer_size, config.host_to_device_ratio) == (256, 512, 8)
    assert config.host_pool_gib is None
    assert config.swap_in_block_size is None


def test_with_memory_enough_every_running_request_has_a_full_buffer() -> None:
    sizes = plan(None)
    assert sizes.num_slabs == sizes.asked_slabs == 16 * 17 + sizes.index_slabs, "513 slots in slabs of 32"
    assert sizes.num_host_slots == 8 * 16 * 17 * 32
    assert sizes.index_slabs == -(-sizes.num_host_slots // 192) + 16
    assert any("a full buffer for each of 16" in line for line in describe(sizes))


def test_index_keys_take_no_more_than_all_running_requests_have() -> None:
    assert plan('{"host_pool_gib": 100}').index_slabs == 16 * -(-8192 // 192)


def test_with_less_device_memory_there_are_as_many_hot_slots_as_fit() -> None:
    full = plan(None)
    available = full.device_bytes * 0.6 / GIB
    sizes = plan(None, device_gib=available)
    hot = sizes.num_slabs - sizes.index_slabs
    assert 17 <= hot < 16 * 17
    assert sizes.device_bytes <= available * GIB
    assert sizes.num_host_slots == 8 * hot * 32
    assert not sizes.has_all_buffers
    assert any(
        f"buffers for {hot // 17} of 16 running requests, which is what fits" in line for line in describe(sizes)
    )


def test_the_host_pool_can_be_given_in_gib() -> None:
    sizes = plan('{"host_pool_gib": 1.5}')
    assert 0 <= 1.5 * GIB - sizes.host_bytes < LAYOUT.token_bytes


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ('{"host_pool_gib": 8}', {"host_gib": 4}, "the host pool needs 8.00 GiB, available are 4.00 GiB"),
        (None, {"device_gib": 0.001}, "available are 1.02 MiB: lower device_buffer_size"),
        ('{"host_to_device_ratio": 0.5}', {}, "holds 4352 tokens, fewer than one request of context-length 8192"),
        (None, {"context": 0}, "context-length (0)"),
        (None, {"max_device_slots": 512}, "max-device-slots 512 is fewer than one hot buffer of 512"),
    ],
)
def test_pools_that_cannot_serve_one_request_are_refused(text: str, kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        plan(text, **kwargs)


@given(
    st.floats(0.05, 2),
    st.integers(1, 64),
    st.integers(600, 40_000),
    st.sampled_from([1, 6]),
    st.none() | st.integers(600),
)
def test_buffers_are_the_largest_that_all_requests_can_have(
    gib: float, running: int, context: int, window: int, max_slots: int | None
) -> None:
    options: dict[str, Any] = {"running": running, "context": context, "window": window, "max_device_slots": max_slots}
    options |= {"device_gib": gib, "host_gib": 10**6}
    pool = '{"host_pool_gib": 100'
    try:
        least = plan(pool + "}", **options)
    except StartupError:
        return
    sizes = plan(pool + "}", **options, fill_memory=True)
    size = sizes.config.device_buffer_size
    most = min(2048, context)
    assert least.config.device_buffer_size == 512 <= size <= max(512, most)
    assert sizes.device_bytes <= gib * GIB
    assert sizes.max_hot_slabs is None or sizes.max_hot_slabs * sizes.slab.slots <= (max_slots or 0)
    assert sizes.num_slabs <= sizes.index_slabs + (sizes.max_hot_slabs or sizes.num_slabs)
    assert (sizes.num_host_slots, sizes.index_slabs) == (least.num_host_slots, least.index_slabs)
    assert sizes.buffer_slabs * sizes.slab.slots >= min(size + window, context)
    if size == 512:
        assert sizes.asked_slabs == least.asked_slabs
    else:
        assert sizes.has_all_buffers
        assert sizes.asked_hot_slabs == running * sizes.buffer_slabs
        assert size % 16 == 0
        assert -(size + window) % sizes.slab.slots < 16, "hardly a slot of a buffer's slabs is left out"
    could_grow = size + 128 <= most and running * (sizes.buffer_slabs + 4) * 32 <= (max_slots or math.inf)
    if sizes.whole_requests < running and could_grow:
        given_size = pool + f', "device_buffer_size": {size + 128}}}'
        with suppress(StartupError):  # not even one request fits
            larger = plan(given_size, **options)
            assert not larger.has_all_buffers or larger.asked_hot_slabs < running * larger.buffer_slabs, "does not fit"


def test_a_buffer_that_is_given_stays_as_it_is() -> None:
    assert plan(None, device_gib=0.5, fill_memory=True).config.device_buffer_size == 63 * 32 - 16
    assert plan('{"device_buffer_size": 512}', device_gib=0.5, fill_memory=True).config.device_buffer_size == 512


def test_buffers_stay_small_where_all_requests_can_be_whole() -> None:
    sizes = plan('{"host_pool_gib": 1}', fill_memory=True)
    assert (sizes.config.device_buffer_size, sizes.whole_requests) == (512, 16)


@pytest.mark.parametrize("window", [1, 6])
def test_the_pools_are_as_big_as_planned(window: int) -> None:
    sizes = plan(None, context=600, window=window)
    coordinator = build_tiers(sizes, torch.device("cpu"))
    host, device = coordinator.host, coordinator.device
    assert host.kv.nbytes + host.index_keys.nbytes == sizes.host_bytes
    assert device.memory.nbytes == sizes.slab_bytes
    residency = coordinator._residency
    tables = [device.hot_granules, device.identity, device.page_table, device.host_slot_of]
    tables += [residency.position_at, residency.hot_of, residency.referenced, residency.hand]
    assert sum(table.nbytes for table in tables) == sizes.table_bytes
    assert (device.window, residency.window) == (window, window)
    coordinator.close()


@pytest.mark.parametrize("context", [300, 506, 507, 512, 513, 600])
def test_one_request_of_the_whole_context_fits_the_slots_that_it_is_given(context: int) -> None:
    """With a window of 6 and a buffer of 512, it is always short up to 507 tokens."""
    sizes = plan('{"host_pool_gib": 1}', context=context, window=6)
    coordinator = build_tiers(sizes, torch.device("cpu"))
    assert coordinator.device.allocate_row(context) is not None
    assert sizes.asked_hot_slabs * sizes.slab.slots == 16 * coordinator.device.used_slots
    coordinator.close()


def test_a_device_without_a_swap_in_backend_is_refused() -> None:
    with pytest.raises(StartupError, match="no swap-in backend for meta, only for cpu and cuda"):
        build_tiers(plan(None, context=600), torch.device("meta"))


def test_a_gpu_without_what_compiles_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels.launch", None)
    with pytest.raises(StartupError, match=r"decoding on cuda:0 needs kernels.launch: install hisparse-pd\[kernels\]"):
        largest_buffer(parse_config(None, model_top_k=256), 8192, 0, torch.device("cuda", 0))


def test_larger_buffers_keep_to_the_limit_of_device_slots() -> None:
    """Slabs of larger buffers have more slots."""
    sizes = plan_sizes(
        parse_config('{"host_pool_gib": 50}', model_top_k=128),
        KVLayout(tuple(range(61)), item_bytes=656, index_key_bytes=132),
        max_running_requests=16,
        context_length=40_000,
        index_page_size=64,
        available_host_bytes=1 << 50,
        available_device_bytes=8 * GIB,
        max_device_slots=20_000,
        fill_memory=True,
        largest_buffer=1024,
    )
    assert sizes.config.device_buffer_size > 512
    assert sizes.max_hot_slabs is not None
    assert sizes.max_hot_slabs * sizes.slab.slots <= 20_000


def test_device_slots_can_be_limited() -> None:
    sizes = plan('{"host_pool_gib": 1}', max_device_slots=2000)
    assert sizes.max_hot_slabs == 62
    assert sizes.num_slabs == 62 + sizes.index_slabs
    assert any("max-device-slots: buffers for 3 of 16" in line for line in describe(sizes))


@pytest.mark.parametrize(("slabs", "whole"), [(49, 0), (50, 1), (81, 1), (82, 2)])
def test_as_many_requests_become_resident_as_sizing_says(slabs: int, whole: int) -> None:
    """Of 1,000 tokens, which take 32 slabs, in addition to two buffers of 9."""
    sizes = plan(
        '{"device_buffer_size": 256, "host_pool_gib": 0.05}', top_k=64, context=1000, max_device_slots=slabs * 32
    )
    assert sizes.whole_requests == whole
    coordinator = build_tiers(sizes, torch.device("cpu"))
    resident = []
    for number in range(whole + 1):
        host_slots = coordinator.host.allocate(990)
        assert host_slots is not None
        assert coordinator.admit_request_direct(f"{number}", host_slots, 990)
        coordinator.fill_rows()
        while not coordinator.residents.filler.is_idle:
            coordinator.fill_rows()
        resident.append(coordinator.device.resident_rows)
    assert resident[:-1] == list(range(1, whole + 1))
    assert resident[-1] <= whole
    coordinator.close()


def test_requests_that_fit_their_buffers_are_all_whole() -> None:
    sizes = plan('{"host_pool_gib": 1}', context=500)
    assert sizes.whole_requests == sizes.max_requests
