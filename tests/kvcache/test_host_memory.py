"""Host memory: zeroed, aligned, and the same bytes for a process that maps it."""

import ctypes
import errno
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from base.errors import StartupError
from hisparse import tiers as tiers_module
from hisparse.config import HiSparseConfig
from hisparse.device_pool import DeviceKVPool
from hisparse.sizing import plan_sizes
from hisparse.tiers import build_tiers
from kvcache import host_memory as memory_module
from kvcache import host_pool as host_pool_module
from kvcache.host_memory import HostMemory
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout

LAYOUT = KVLayout(index_layer_of=(0, 0, 1), item_bytes=20, index_key_bytes=12)


@pytest.mark.parametrize("shareable", [True, False])
def test_layers_of_a_pool_are_zeroed_and_do_not_overlap(shareable: bool) -> None:
    pool = HostKVPool(LAYOUT, num_slots=300, pin=False, shareable=shareable)
    assert not pool.kv.any()
    assert not pool.index_keys.any()
    pool.kv.fill_(1)
    pool.index_keys.fill_(2)
    assert bool((pool.kv == 1).all())
    info = pool.get_contiguous_buf_infos()
    ptrs, lengths = info.ptrs, info.lengths
    assert ptrs[0] % mmap.PAGESIZE == ptrs[3] % mmap.PAGESIZE == 0
    ends = [ptr + length for ptr, length in zip(ptrs, lengths, strict=True)]
    assert all(end <= ptr for end, ptr in zip(ends, ptrs[1:], strict=False))


def test_a_shared_pool_is_the_same_memory_by_its_descriptor() -> None:
    pool = HostKVPool(LAYOUT, num_slots=300, pin=False, shareable=True)
    pool.kv[1, 7] = torch.arange(20)
    region = pool.shared()
    assert region is not None
    assert os.readlink(f"/proc/self/fd/{region.fd}").startswith(f"/memfd:{region.name} ")
    with open(f"/proc/self/fd/{region.fd}", "r+b") as memory:
        mapping = mmap.mmap(memory.fileno(), region.length)
    offset = pool.kv[1, 7].data_ptr() - region.base
    mapped = torch.frombuffer(mapping, dtype=torch.uint8, count=20, offset=offset)
    assert mapped.tolist() == list(range(20))
    mapped[2] = 9
    assert pool.kv[1, 7].tolist() == [0, 1, 9, *range(3, 20)]


def test_a_pool_that_was_closed_or_not_made_for_it_is_not_shared() -> None:
    assert HostKVPool(LAYOUT, num_slots=3, pin=False).shared() is None
    pool = HostKVPool(LAYOUT, num_slots=3, pin=False, shareable=True)
    region = pool.shared()
    assert region is not None
    pool.close()
    assert pool.shared() is None
    assert not os.path.exists(f"/proc/self/fd/{region.fd}")
    assert not pool.kv.any(), "the memory stays as long as its tensors"


@pytest.mark.parametrize("shareable", [True, False])
@pytest.mark.parametrize("can_populate", [True, False], ids=["populated", "touched"])
def test_all_pages_are_there_before_anything_is_stored(
    shareable: bool, can_populate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel is too old to populate them."""
    if not can_populate:
        refuse_to_populate(monkeypatch, errno.EINVAL)
    before = resident_bytes()
    memory = HostMemory(64 << 20, shareable, cpus=os.sched_getaffinity(0))
    assert resident_bytes() - before > 60 << 20
    assert not memory.tensor(0, (64 << 20,)).any()


def test_memory_that_is_not_shared_may_have_large_pages() -> None:
    """Shared memory may where an administrator allows it; memory of this process alone, wherever it asks for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("large pages are turned off")
    memory = HostMemory(64 << 20, shareable=False)
    address = memory.tensor(1 << 20, (1,)).data_ptr()
    [mapping] = [part for part in mappings() if address in part.addresses]
    assert mapping.fields["THPeligible"] == "1"


def test_threads_that_take_memory_stay_on_the_processors_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = min(os.sched_getaffinity(0))
    seen = []
    piece = memory_module._populate

    def noting(address: int, length: int) -> int:
        seen.append(os.sched_getaffinity(0))
        return piece(address, length)

    monkeypatch.setattr(memory_module, "_populate", noting)
    monkeypatch.setattr(memory_module, "_PIECE", 1 << 20)
    mine = os.sched_getaffinity(0)
    HostMemory(5 << 20, shareable=True, cpus={cpu})
    assert seen == [{cpu}] * 5
    assert os.sched_getaffinity(0) == mine


@dataclass
class Mapping:
    """An entry of /proc/self/smaps."""

    addresses: range
    fields: dict[str, str]


def mappings() -> list[Mapping]:
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            found.append(Mapping(range(int(bounds[1], 16), int(bounds[2], 16)), {}))
        else:
            name, _, value = line.partition(":")
            found[-1].fields[name] = value.strip()
    return found


def refuse_to_populate(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have madvise fail with this errno."""

    class Libc:
        def madvise(self, *_: object) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())


def test_memory_that_the_machine_does_not_have_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_populate(monkeypatch, errno.ENOMEM)
    with pytest.raises(StartupError, match="lower host_to_device_ratio"):
        HostMemory(1 << 20, shareable=False)


def resident_bytes() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def test_no_slots_are_no_error() -> None:
    assert HostMemory(0, shareable=True).tensor(0, (2, 0, 3)).shape == (2, 0, 3)


class Runtime:
    """CUDA's, as far as pinning goes: so many registrations succeed."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, _length: int, _flags: int) -> int:  # noqa: N802
        if len(self.registered) == self.room:
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.remove(address)
        return 0

    def check(self, code: int) -> None:
        if code:
            raise RuntimeError("out of memory")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(room=1)
    monkeypatch.setattr(host_pool_module, "_cudart", lambda: runtime)
    monkeypatch.setattr(host_pool_module, "_check", runtime.check)
    return runtime


def test_a_pool_that_cannot_be_pinned_as_a_whole_leaves_nothing_pinned(runtime: Runtime) -> None:
    """Whoever gets the addresses of memory that went while it was pinned cannot pin them."""
    with pytest.raises(StartupError, match="of host memory cannot be pinned"):
        HostKVPool(LAYOUT, num_slots=3, pin=True)
    assert not runtime.registered


def test_tiers_that_cannot_be_put_together_leave_nothing_pinned(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> DeviceKVPool:
        raise StartupError("no room on the device")

    runtime.room = 2
    monkeypatch.setattr(tiers_module, "cpus_near", lambda device: [0])
    monkeypatch.setattr(tiers_module, "DeviceKVPool", no_room)
    config = HiSparseConfig(device_buffer_size=64, top_k=32, host_to_device_ratio=2)
    sizes = plan_sizes(
        config,
        LAYOUT,
        max_running_requests=1,
        context_length=128,
        index_page_size=64,
        available_host_bytes=1 << 30,
        available_device_bytes=1 << 30,
    )
    with pytest.raises(StartupError, match="no room on the device"):
        build_tiers(sizes, torch.device("cuda"))
    assert not runtime.registered
