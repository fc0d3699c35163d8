"""How the ranks of a group find each other, and the connections between those of several hosts.

Ranks of one host share what they inherit. Those of several hosts meet at a store of torch.distributed, which rank 0
serves at the address that all were given. It asks for no key, as the collectives' own connections do not: who reaches
them can disturb the group. What ranks send each other beside collectives goes over connections of which both ends have
shown that they know the secret.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

import psutil
import structlog
from torch.distributed import DistError, DistNetworkError, FileStore, Store, TCPStore  # type: ignore[attr-defined]

from base.errors import StartupError
from ranks.barrier import GroupFailed
from ranks.place import NO_LINE, RankPlace

log = structlog.get_logger(__name__)

MEETING_S = 600.0
"""How long the hosts of a group wait for each other: one may have to fetch an image first."""
_AGAIN_S = 1.0
_HANDSHAKE_S = 10.0
_TIMEVAL = struct.Struct("@ll")

Purpose = Literal["link", "line"]


@dataclass(frozen=True)
class Meeting:
    """What connects a rank with the others.

    place: with a line between rank 0 and every rank of another host, if ranks have lines. links: to the counterparts,
    by rank. interface: the name of the network interface that leads to the others. clock_ahead: seconds by which the
    monotonic clock of rank 0 is ahead of this host's.
    """

    place: RankPlace
    store: Store
    links: dict[int, socket.socket]
    interface: str | None
    clock_ahead: float


def meet(place: RankPlace, secret: bytes, patience: float = MEETING_S) -> Meeting:
    """Find the other ranks. Connects to those of other hosts: waits for all of them, for so many seconds.

    secret: what only processes of this cluster know. Raises GroupFailed if they do not come, as when another host is
    started later, and StartupError if they cannot be a group: other keys, another shape, or one rank twice.
    """
    if place.hosts == 1:
        return Meeting(place, FileStore(f"/proc/self/fd/{place.store}", place.size), {}, "lo", 0.0)
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
        address: str = probe.getsockname()[0]
        return address


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
    found: dict[tuple[Purpose, int], socket.socket] = {}
    ahead = 0.0
    with socket.create_server((address, 0), backlog=2 * place.size) as server:
        store.set(f"at/{place.rank}", json.dumps(server.getsockname()))
        for purpose, other in _outgoing(place):
            at, port = json.loads(store.get(f"at/{other}"))
            connection = socket.create_connection((at, port), timeout=_HANDSHAKE_S)
            clock = _show(connection, key, purpose, place.rank)
            if other == 0:
                ahead = clock
            found[purpose, other] = connection
        incoming = _incoming(place)
        while not incoming <= found.keys():
            server.settimeout(max(0.0, until - time.monotonic()))
            connection, _ = server.accept()
            if (who := _recognize(connection, key)) in incoming - found.keys():
                found[who] = connection
            else:
                log.warning("a stranger connected to the group", address=connection.getpeername()[0])
                connection.close()
    for connection in found.values():
        limit(connection, 0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    log.info("connected to the ranks of other hosts", connections=len(found), address=address)
    lines = [line if line != NO_LINE else _line(place, rank, found) for rank, line in enumerate(place.lines, start=1)]
    links = {other: connection for (purpose, other), connection in found.items() if purpose == "link"}
    return Meeting(replace(place, lines=tuple(lines)), store, links, interface_of(address), ahead)


def _outgoing(place: RankPlace) -> Iterator[tuple[Purpose, int]]:
    yield from (("link", other) for other in place.counterparts if other < place.rank)
    if place.host and place.lines:
        yield "line", 0


def _incoming(place: RankPlace) -> set[tuple[Purpose, int]]:
    links: set[tuple[Purpose, int]] = {("link", other) for other in place.counterparts if other > place.rank}
    lines = range(place.per_host, place.size) if place.rank == 0 and place.lines else ()
    return links | {("line", other) for other in lines}


def _show(connection: socket.socket, key: bytes, purpose: Purpose, rank: int) -> float:
    """Say who this is. Returns by how much the other end's clock is ahead. Raises StartupError if it is a stranger."""
    with _channel(connection) as channel:
        try:
            answer_challenge(channel, key)
            deliver_challenge(channel, key)
            asked_at = time.monotonic()
            channel.send_bytes(json.dumps([purpose, rank]).encode())
            theirs = float(channel.recv_bytes(64))
        except (AuthenticationError, EOFError) as error:
            raise StartupError(f"rank {rank}: an earlier host of the group has other keys") from error
        return theirs - (asked_at + time.monotonic()) / 2


def _recognize(connection: socket.socket, key: bytes) -> tuple[Purpose, int] | None:
    """Who connected; None if it is a stranger."""
    with _channel(connection) as channel:
        try:
            deliver_challenge(channel, key)
            answer_challenge(channel, key)
            purpose, rank = json.loads(channel.recv_bytes(256))
            channel.send_bytes(repr(time.monotonic()).encode())
        except (AuthenticationError, EOFError, OSError, ValueError):
            return None
        return purpose, rank


def _channel(connection: socket.socket) -> Connection:
    """To talk over a connection for as long as both sides are quick."""
    connection.settimeout(None)
    limit(connection, _HANDSHAKE_S)
    return Connection(os.dup(connection.fileno()))


def limit(connection: socket.socket, seconds: float) -> None:
    """From now on receiving fails with BlockingIOError after so many seconds; 0: never."""
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6)))


def _line(place: RankPlace, rank: int, found: Mapping[tuple[Purpose, int], socket.socket]) -> tuple[int, int]:
    """The line between rank 0 and that one, as far as this process has an end of it."""
    if place.rank == 0:
        return found["line", rank].detach(), -1
    return (-1, found["line", 0].detach()) if rank == place.rank else NO_LINE
