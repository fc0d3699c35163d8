"""Which transport is taken, the best that both ends have; and shared memory, mapped only if it is that memory."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from base.errors import StartupError
from control.messages import Destination
from tests.identity import IDENTITY
from tests.transfer.world import descriptors, write
from transfer import engine as engine_module
from transfer import shm
from transfer.choices import EngineTransport, TransferProtocol, Transport
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo, Session, SharedMemory
from transfer.shm import SharedMemoryChannel, maps_other_processes
from transfer.transport import Unreachable
from transfer.transports import TRANSPORTS, NoRoute, Transports, choose_transports, num_engines
from transfer.writer import TransferError

BUFFERS = BufferInfo(ptrs=(4096,), lengths=(4096,), item_lengths=(64,))
RDMA, TCP = Session(transport="rdma", name="a:1"), Session(transport="tcp", name="a:2")
SHARED = SharedMemory(pid=1, fd=2, name="m", base=4096, length=4096)


class FakeEngine(KVTransferEngine):
    """Stands for Mooncake, which takes TCP in silence where there is no RDMA device."""

    def __init__(self, host: str, transport: EngineTransport, ib_device: str = "") -> None:
        self.session = Session(transport=transport, name=f"{host}:1")

    def channel(self, session: Session, reading: bool = False) -> Any:
        assert session.transport == self.session.transport, "an engine speaks one transport"
        return SimpleNamespace(transport=session.transport, session=session)


@pytest.fixture(params=["rdma", "no rdma"])
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Whether this machine has an RDMA device."""
    monkeypatch.setattr(engine_module, "KVTransferEngine", FakeEngine)
    monkeypatch.setattr(engine_module, "_INFINIBAND", tmp_path)
    if request.param == "rdma":
        (tmp_path / "mlx5_0").mkdir()
    return request.param == "rdma"


def test_every_transport_that_messages_name_is_registered() -> None:
    assert set(TRANSPORTS) == set(get_args(Transport))
    assert set(TRANSPORTS) | {"auto"} == set(get_args(TransferProtocol))
    assert [num_engines((name,)) for name in ("shm", "rdma", "tcp")] == [0, 1, 1], "only engines take ports"


def test_auto_offers_all_that_the_machine_has(devices: bool) -> None:
    assert choose_transports("auto", "") == (("shm", "rdma", "tcp") if devices else ("shm", "tcp"))
    assert choose_transports("tcp", "") == ("tcp",)
    assert choose_transports("shm", "") == ("shm",)


def test_rdma_without_a_device_is_refused(devices: bool) -> None:
    """Mooncake would take TCP in silence."""
    if devices:
        assert choose_transports("rdma", "mlx5_0") == ("rdma",)
        with pytest.raises(StartupError, match="mlx5_9 not found; this machine has mlx5_0"):
            choose_transports("rdma", "mlx5_0,mlx5_9")
    else:
        with pytest.raises(StartupError, match="no RDMA device"):
            choose_transports("rdma", "")


@pytest.mark.parametrize("devices", ["rdma"], indirect=True)
@pytest.mark.parametrize(
    ("wanted", "sessions", "taken"),
    [
        ("auto", (RDMA, TCP), RDMA),
        ("auto", (TCP,), TCP),
        ("tcp", (RDMA, TCP), TCP),
        ("rdma", (RDMA, TCP), RDMA),
    ],
)
@pytest.mark.usefixtures("devices")
def test_mixed_peers_meet_on_the_best_transport_that_both_have(
    wanted: TransferProtocol, sessions: tuple[Session, ...], taken: Session
) -> None:
    destination = Destination(identity=IDENTITY, buffers=BUFFERS, sessions=sessions)
    channel = Transports("h", wanted).connect(destination)
    assert channel.session == taken  # type: ignore[attr-defined]


@pytest.mark.parametrize("devices", ["rdma"], indirect=True)
@pytest.mark.usefixtures("devices")
def test_nothing_in_common_is_an_error_that_names_both_sides() -> None:
    destination = Destination(identity=IDENTITY, buffers=BUFFERS, sessions=(TCP,))
    with pytest.raises(NoRoute, match="rdma here, tcp at the decode node"):
        Transports("h", "rdma").connect(destination)


@pytest.mark.parametrize("devices", ["no rdma"], indirect=True)
@pytest.mark.usefixtures("devices")
def test_a_host_is_shared_if_the_mapping_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    destination = Destination(identity=IDENTITY, buffers=BUFFERS, sessions=(TCP,), shared=SHARED)

    def no_mapping(memory: SharedMemory, reading: bool) -> object:
        raise Unreachable("Permission denied")

    monkeypatch.setattr(shm, "SharedMemoryChannel", no_mapping)
    assert Transports("h", "auto").connect(destination).transport == "tcp"
    with pytest.raises(NoRoute, match="shm: Permission denied"):
        Transports("h", "shm").connect(destination)
    monkeypatch.setattr(shm, "SharedMemoryChannel", lambda memory, reading: SimpleNamespace(transport="shm"))
    assert Transports("h", "auto").connect(destination).transport == "shm"
    assert Transports("h", "tcp").connect(destination).transport == "tcp"


SIZE = 1 << 20
OWNER = """
import sys, numpy, torch
from kvcache.host_memory import HostMemory
size, seed = map(int, sys.argv[1:])
memory = HostMemory(size, shareable=True)
tensor = memory.tensor(0, (size,))
if seed >= 0:
    tensor[:] = torch.from_numpy(numpy.random.default_rng(seed).integers(1, 256, size, dtype=numpy.uint8))
print(memory.shared.model_dump_json(), flush=True)
for line in sys.stdin:
    start, stop = map(int, line.split())
    print(tensor[start:stop].numpy().tobytes().hex(), flush=True)
"""


class Owner:
    """A process that shares a piece of memory and tells what is in it: zeros, or random bytes if there is a seed."""

    def __init__(self, size: int = SIZE, seed: int = -1) -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-c", OWNER, str(size), str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self.process.stdout is not None
        self.memory = SharedMemory.model_validate_json(self.process.stdout.readline())

    def content(self, start: int, stop: int) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(start, stop, file=self.process.stdin, flush=True)
        return bytes.fromhex(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.kill()


def test_every_byte_lands_where_it_should_and_nowhere_else(owner: Owner) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(1, 256, SIZE, dtype=np.uint8)
    order = rng.permutation(SIZE // 1000)
    pieces = [(i * 1000, int(j) * 1000, 997) for i, j in enumerate(order)]
    channel = SharedMemoryChannel(owner.memory)
    write(
        channel,
        [descriptors(source.ctypes.data, owner.memory.base, pieces[i : i + 100]) for i in range(0, len(pieces), 100)],
    )
    channel.close()
    expected = np.zeros(SIZE, dtype=np.uint8)
    for start, to, length in pieces:
        expected[to : to + length] = source[start : start + length]
    assert owner.content(0, SIZE) == expected.tobytes()


@pytest.mark.parametrize(("start", "length"), [(-1, 10), (SIZE - 5, 10)])
def test_an_address_outside_the_memory_is_refused(owner: Owner, start: int, length: int) -> None:
    before = owner.content(0, 10)
    source = ~np.frombuffer(before, dtype=np.uint8)
    channel = SharedMemoryChannel(owner.memory)
    with pytest.raises(TransferError):
        write(channel, [descriptors(source.ctypes.data, owner.memory.base, [(0, 0, 10), (0, start, length)])])
    assert owner.content(0, 10) == before


@pytest.mark.parametrize(
    "change",
    [{"name": "another"}, {"fd": 0}, {"fd": 1 << 20}, {"length": 1 << 21}, {"pid": os.getpid()}, {"pid": 2**22 + 1}],
)
def test_another_memory_is_not_mapped_and_leaves_no_descriptor_behind(owner: Owner, change: dict[str, object]) -> None:
    """Two containers have processes of the same number: only the mapping proves that the host is shared. A prefill
    node in a container of its own meets with a refusal for each decode node, again and again."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        with pytest.raises(Unreachable):
            SharedMemoryChannel(owner.memory.model_copy(update=change))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_to_an_owner_that_ended_is_an_error() -> None:
    owner = Owner()
    source = np.ones(10, dtype=np.uint8)
    channel = SharedMemoryChannel(owner.memory)
    owner.kill()
    with pytest.raises(TransferError, match="has ended"):
        write(channel, [descriptors(source.ctypes.data, owner.memory.base, [(0, 0, 10)])])
    channel.close()
    with pytest.raises(Unreachable):
        SharedMemoryChannel(owner.memory)


def test_whether_other_processes_can_be_mapped_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert maps_other_processes()

    def refused(path: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "readlink", refused)
    assert not maps_other_processes()
