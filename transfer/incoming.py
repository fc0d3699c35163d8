"""Cuts the connections by which others write to the memory of this process: a proof that nothing old lands any more.

A sender that calls a write failed, or that has died, may leave bytes behind: its kernel goes on sending what it has
taken, for minutes after a partition, and the kernel here keeps what has arrived until Mooncake reads it. They land only
through connections that Mooncake reads, and these can be closed.
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
"""Linux's numbers (include/net/tcp_states.h) of the states in which bytes may come (ESTABLISHED, SYN_RECV, CLOSE_WAIT),
and of the listening state."""
_NOT_THERE = (errno.ENOENT, errno.EBADF, errno.ENOTSOCK)
"""A descriptor was closed, or given to something else, since it was listed."""
_LOOK_S = 0.05
_AFTER_ERROR_S = 1.0


class IncomingCut:
    """A fence (`transfer.fencing.Fence`): closes every connection that there is to some ports of this process.

    When it has `passed`, nothing lands any more of what was sent over those connections. They do not say whose they
    are, so whoever writes at the time connects again and repeats what was cut (`transfer.writer.Outcome.CUT`).

    A thread does it, since the tables in /proc are as long as the machine has connections. It ends with the cut.
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._passed = threading.Event()
        if ports:
            threading.Thread(target=self._work, args=(CutConnections(ports),), name="cut", daemon=True).start()
        else:
            self._passed.set()

    def passed(self) -> bool:
        """See Fence."""
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
                # Whatever it is: were the thread to end, the cut would never pass and its slots never be free.
                if not failing:
                    log.exception("cannot see which connections bring KV; slots stay in quarantine until that works")
                failing = True
                time.sleep(_AFTER_ERROR_S)


class CutConnections:
    """Cuts the connections to some ports of this process, step by step."""

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._closing: frozenset[int] | None = None
        """Inodes of the sockets that were shut down; None while Mooncake has yet to accept one."""

    def advance(self) -> bool:
        """Do what takes no waiting. Returns whether all are closed. Raises OSError if they cannot be looked at."""
        with _accepted(self._ports) as accepted:
            if self._closing is None and not _has_others(self._ports, accepted.keys()):
                for connection in accepted.values():
                    # One that has ended cannot be shut down, but may have bytes to read.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._closing = frozenset(accepted)
            # The kernel refuses what arrives from now on. Mooncake reads what came before, then closes the socket.
            return self._closing is not None and self._closing.isdisjoint(accepted)


@contextmanager
def _accepted(ports: frozenset[int]) -> Iterator[Mapping[int, socket.socket]]:
    """This process's connections to these ports, by inode: all of them. Raises OSError if one cannot be looked at."""
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
                # One that is gone does not matter. One that cannot be looked at may be such a connection.
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
    """Whether the kernel has connections to these ports that the process may still accept."""
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
