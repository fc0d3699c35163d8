"""A fence that closes the connections through which other processes write to this one's memory.

After a write failed or its sender died, the sender's kernel goes on sending for minutes, and the kernel here keeps what
has arrived until Mooncake reads it. These bytes land only through connections, which this process can close.
"""

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_FDS = "/proc/self/fd"
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_OPEN, _LISTEN = ("01", "03", "08"), "0A"
"""Of include/net/tcp_states.h: bytes may come (ESTABLISHED, SYN_RECV, CLOSE_WAIT); listening."""
_NOT_THERE = (errno.ENOENT, errno.EBADF, errno.ENOTSOCK)
"""The descriptor was closed or reused since it was listed."""
_LOOK_S = 0.05
_AFTER_ERROR_S = 1.0


class IncomingCut:
    """A `transfer.fencing.Fence` that closes every connection to some ports of this process.

    A connection does not tell its owner, so live writers connect again and repeat what was cut
    (`transfer.writer.Outcome.CUT`). A thread works, since /proc lists all connections of the machine.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._passed = threading.Event()
        if ports:
            threading.Thread(target=self._work, args=(CutConnections(ports),), name="cut", daemon=True).start()
        else:
            self._passed.set()

    def passed(self) -> bool:
        return self._passed.is_set()

    def _work(self, connections: "CutConnections") -> None:
        failing = False
        while not self._passed.is_set():
            try:
                if connections.advance():
                    self._passed.set()
                else:
                    time.sleep(_LOOK_S)
            except Exception:
                # If the thread ended, the fence would never pass and its slots never be free.
                if not failing:
                    log.exception("cannot see which connections bring KV; slots stay in quarantine until that works")
                failing = True
                time.sleep(_AFTER_ERROR_S)


class CutConnections:
    """The steps of a cut of the connections to some ports of this process."""

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._closing: frozenset[int] | None = None
        """Inodes of the sockets that were shut down; None until Mooncake has accepted all."""

    def advance(self) -> bool:
        """Take a step that does not block. Returns whether all are closed. Raises OSError if one cannot be examined."""
        with _accepted(self._ports) as accepted:
            if self._closing is None and not _has_others(self._ports, accepted.keys()):
                for connection in accepted.values():
                    # An ended connection cannot be shut down, but may have bytes to read.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._closing = frozenset(accepted)
            # The kernel refuses later bytes. Mooncake reads the earlier ones and closes the socket.
            return self._closing is not None and self._closing.isdisjoint(accepted)


@contextmanager
def _accepted(ports: frozenset[int]) -> Iterator[Mapping[int, socket.socket]]:
    """All connections of this process to these ports, by inode. Raises OSError if one cannot be examined."""
    with ExitStack() as held:
        connections = {}
        for name in os.listdir(_FDS):
            try:
                if not stat.S_ISSOCK(os.stat(f"{_FDS}/{name}").st_mode):
                    continue
                fd = os.dup(int(name))
                held.callback(os.close, fd)
                connection = socket.socket(fileno=fd)
                held.callback(connection.detach)
                if _is_connection_to(ports, connection):
                    connections[os.fstat(fd).st_ino] = connection
            except OSError as error:
                # A socket that cannot be examined may be such a connection.
                if error.errno not in _NOT_THERE:
                    raise
        yield connections


def _is_connection_to(ports: frozenset[int], candidate: socket.socket) -> bool:
    return (
        candidate.family in (socket.AF_INET, socket.AF_INET6)
        and candidate.type == socket.SOCK_STREAM
        and not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and candidate.getsockname()[1] in ports
    )


def _has_others(ports: frozenset[int], accepted: Collection[int]) -> bool:
    """Whether the kernel has connections to these ports that the process has not accepted."""
    endings = tuple(f":{port:04X}" for port in ports)
    for table in _TABLES:
        # Without IPv6 there is only one.
        with suppress(FileNotFoundError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, rest = line.split(maxsplit=4)
                if local.endswith(endings):
                    queues, _, _, _, _, inode, *_ = rest.split()
                    # Of a listening socket: how many connections wait to be accepted.
                    backlog = int(queues.rpartition(":")[2], 16)
                    if (state == _LISTEN and backlog) or (state in _OPEN and int(inode) not in accepted):
                        return True
    return False
