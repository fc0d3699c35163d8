"""Which transport is taken: the best that both ends have, and never one in silence that was not asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from base.errors import StartupError
from control.messages import Destination
from tests.identity import IDENTITY
from transfer import engine as engine_module
from transfer import shm
from transfer.choices import EngineTransport, TransferProtocol, Transport
from transfer.engine import KVTransferEngine
from transfer.memory import BufferInfo, Session, SharedMemory
from transfer.transport import Unreachable
from transfer.transports import TRANSPORTS, NoRoute, Transports, choose_transports, num_engines

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
