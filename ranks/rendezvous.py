"""How the ranks of a group find each other, and the connections between those of several hosts.

Ranks of one host share what they inherit. Those of several hosts meet at a store of torch.distributed, which rank 0
serves at the address that all were given. It asks for no key, as the collectives' own connections do not: who reaches
them can disturb the group. What ranks send each other in addition to collectives goes over connections that
authenticate both ends and each frame (`ranks/sealed_socket.py`). Without keys there is no secret, and anybody can do
both.
"""

import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil
import structlog
from torch.distributed import DistError, DistNetworkError, FileStore, Store, TCPStore  # type: ignore[attr-defined]

from base.errors import StartupError
from ranks.barrier import GroupFailed
from ranks.place import RankPlace
from ranks.sealed_socket import INHERITED, PATIENCE_S, Caller, HandshakeFailed, Purpose, SealedSocket, accept, call

log = structlog.get_logger(__name__)

MEETING_S = 600.0
"""How long the hosts of a group wait for each other: one may have to fetch an image first."""
_AGAIN_S = 1.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Meeting:
    """What connects a rank with the others.

    links: to the counterparts, by rank. lines: between rank 0 and every other rank, by the other rank, if ranks have
    lines. interface: the name of the network interface that leads to the others. clock_ahead: seconds by
    which the monotonic clock of rank 0 is ahead of this host's.
    """

    store: Store
    links: dict[int, SealedSocket]
    lines: dict[int, SealedSocket]
    interface: str | None
    clock_ahead: float


def meet(place: RankPlace, secret: bytes, patience: float = MEETING_S) -> Meeting:
    """Find the other ranks. Connects to those of other hosts: waits for all of them, for `patience` seconds.

    secret: what only processes of this cluster know. Raises GroupFailed if they do not come, as when another host is
    started later, and StartupError if they cannot be a group: other keys, another shape, or one rank twice.
    """
    if place.hosts == 1:
        found = FileStore(f"/proc/self/fd/{place.store}", place.size)
        return Meeting(found, {}, _inherited_lines(place), "lo", 0.0)
    until = time.monotonic() + patience
    try:
        store = _join(place, until)
        _check_shape(place, store)
        return _connect(place, store, secret, until)
    except DistError as error:
        waited = f"waited {patience:g} s" if time.monotonic() > until else str(error).splitlines()[0]
        raise GroupFailed(f"rank {place.rank} did not find its group at {place.meeting}: {waited}") from error
    except OSError as error:
        raise GroupFailed(f"rank {place.rank} did not find its group at {place.meeting}: {error}") from error


def local_address(meeting: str) -> str:
    """The address of this host that packets to the meeting come from. Raises OSError if the name is unknown."""
    host, _, port = meeting.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return str(name)
    return None


def _join(place: RankPlace, until: float) -> TCPStore:
    """The group's store. Waits while a group that ends still has this rank at that address: its values are not ours."""
    log.info("looking for the ranks of other hosts", at=place.meeting, rank=place.rank, of=place.size)
    host, _, port = place.meeting.rpartition(":")
    while True:
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        try:
            store = TCPStore(
                host, int(port), place.size, is_master=place.rank == 0, timeout=left, wait_for_workers=False
            )
            if store.add(f"joined/{place.rank}", 1) == 1:
                return store
        except DistNetworkError:  # A store that ends, or a port that is taken.
            if place.rank == 0 or time.monotonic() > until:
                raise
        else:
            del store
            if place.rank == 0 or time.monotonic() > until:
                raise StartupError(
                    f"rank {place.rank} is in the group at {place.meeting} already: --dist-init-addr must be an "
                    "address of the host with --node-rank 0, and each host needs a --node-rank of its own"
                )
        time.sleep(_AGAIN_S)


def _check_shape(place: RankPlace, store: Store) -> None:
    mine = f"--ranks {place.size} --nnodes {place.hosts}"
    if place.rank == 0:
        store.set("shape", mine)
    elif (first := store.get("shape").decode()) != mine:
        raise StartupError(f"the group at {place.meeting} has {first}, rank {place.rank} has {mine}")


def _connect(place: RankPlace, store: Store, secret: bytes, until: float) -> Meeting:
    """Ranks of later hosts connect to those of earlier ones, which accept."""
    if place.rank == 0:
        store.set("nonce", secrets.token_hex(32))
    key = hmac.digest(secret, store.get("nonce"), hashlib.sha256)
    address = local_address(place.meeting)
    found: dict[Caller, SealedSocket] = {}
    ahead = 0.0
    with socket.create_server((address, 0), backlog=2 * place.size) as server:
        at = server.getsockname()
        store.set(f"at/{place.rank}", json.dumps(at))
        for caller in (caller for caller in _callers(place) if caller.rank == place.rank):
            found[caller], clock = _called(store, key, caller)
            if caller.to == 0:
                ahead = clock
        found |= _accepted(place, server, key, until)
    for session in found.values():
        session.be_patient(0)
    log.info("connected to the ranks of other hosts", connections=len(found), address=address)
    others = {caller: caller.rank + caller.to - place.rank for caller in found}
    links, lines = (
        {others[caller]: session for caller, session in found.items() if caller.purpose is purpose}
        for purpose in Purpose
    )
    return Meeting(store, links, _inherited_lines(place) | lines, interface_of(address), ahead)


def _accepted(place: RankPlace, server: socket.socket, key: bytes, until: float) -> dict[Caller, SealedSocket]:
    """Sessions with the ranks that connect to this one, each made on a thread: strangers may say nothing, and a rank
    that waited for them would give up."""
    at, expected = server.getsockname(), {caller for caller in _callers(place) if caller.to == place.rank}
    found: dict[Caller, SealedSocket] = {}
    met: queue.SimpleQueue[tuple[Caller, SealedSocket]] = queue.SimpleQueue()

    def shake_hands(connection: socket.socket, host: str) -> None:
        try:
            _tune(connection)
            met.put(accept(connection, key, place.rank, at))
        except (HandshakeFailed, OSError) as failed:
            log.warning("a stranger connected to the group", address=host, reason=str(failed))

    server.settimeout(_LOOK_S)
    while not expected <= found.keys():
        if time.monotonic() > until:
            raise TimeoutError("timed out")
        with suppress(TimeoutError, ConnectionAbortedError):
            connection, (host, _) = server.accept()
            threading.Thread(target=shake_hands, args=(connection, host), name="handshake", daemon=True).start()
        while not met.empty():
            who, session = met.get()
            if who in expected - found.keys():
                found[who] = session
            else:
                log.warning("a rank connected to the group that is not expected", rank=who.rank)
                session.close()
    return found


def _inherited_lines(place: RankPlace) -> dict[int, SealedSocket]:
    """This rank's ends of its lines within its host, by the other rank."""
    ends = {rank: first for rank, (first, _) in enumerate(place.lines, start=1)}
    if place.rank:
        ends = {0: place.lines[place.rank - 1][1]} if place.lines else {}
    return {rank: SealedSocket(socket.socket(fileno=end), INHERITED) for rank, end in ends.items() if end >= 0}


def _called(store: Store, key: bytes, caller: Caller) -> tuple[SealedSocket, float]:
    """See `call`. Raises StartupError if the process that answers is not that rank."""
    host, port = json.loads(store.get(f"at/{caller.to}"))
    connection = socket.create_connection((host, port), timeout=PATIENCE_S)
    _tune(connection)
    try:
        return call(connection, key, caller, (host, port))
    except HandshakeFailed as failed:
        raise StartupError(
            f"rank {caller.rank} did not get a session with rank {caller.to} at {host}:{port}: {failed}. Its host "
            "needs the same keys, and only hosts of the group may reach --dist-init-addr"
        ) from failed


def _callers(place: RankPlace) -> list[Caller]:
    """Who calls whom, of the sessions of this rank with those of other hosts: the later rank the earlier one."""
    links = [Caller(Purpose.LINK, max(place.rank, other), min(place.rank, other)) for other in place.counterparts]
    lines = [Caller(Purpose.LINE, other, 0) for other in range(place.per_host, place.size) if place.lines]
    return links + [line for line in lines if place.rank in (0, line.rank)]


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
