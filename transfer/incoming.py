"""The connections by which others write to the memory of this process, and the proof that old ones write no more.

A sender that calls a write failed, or that has died, may leave bytes behind: its kernel goes on sending what it has
taken, for minutes after a partition, and the kernel here keeps what has arrived until Mooncake reads it. Nobody calls
those bytes back. But they land only through connections that Mooncake reads, and these can be closed.
"""

import os
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_FDS = "/proc/self/fd"
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _SYN_RECV, _CLOSE_WAIT, _LISTEN = "01", "03", "08", "0A"
"""States as Linux numbers them (include/net/tcp_states.h): those from which bytes may come, and the listening one."""


class IncomingCut:
    """Closes every connection to some ports of this process that there is by now.

    When it has `passed`, nothing lands any more of what was sent over those connections, however late it arrives.
    Connections do not say whose they are. So whoever writes at the time connects again and repeats what was cut off
    (`transfer.writer.Outcome.CUT`).
    """

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._closing: frozenset[int] | None = None
        """The inodes of the sockets that were shut down; None while there are connections that cannot be yet."""

    def passed(self) -> bool:
        """Whether it is done; does what can be done without waiting. To be asked again and again."""
        if not self._ports:
            return True
        with _accepted(self._ports) as accepted:
            if self._closing is None and not _others(self._ports, accepted.keys()):
                for connection in accepted.values():
                    # What has ended already has nothing to shut down, but may have bytes to read.
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._closing = frozenset(accepted)
            # The kernel refuses what arrives from now on. Mooncake reads what came before, and then closes the socket.
            return self._closing is not None and self._closing.isdisjoint(accepted)


@contextmanager
def _accepted(ports: frozenset[int]) -> Iterator[Mapping[int, socket.socket]]:
    """This process's connections to these ports, by inode."""
    with ExitStack() as held:
        connections = {}
        for name in os.listdir(_FDS):
            # Descriptors come and go meanwhile.
            with suppress(OSError):
                if not stat.S_ISSOCK(os.stat(f"{_FDS}/{name}").st_mode):
                    continue
                fd = os.dup(int(name))
                held.callback(os.close, fd)
                connection = socket.socket(fileno=fd)
                held.callback(connection.detach)
                if _is_connection_to(ports, connection):
                    connections[os.fstat(fd).st_ino] = connection
        yield connections


def _is_connection_to(ports: frozenset[int], candidate: socket.socket) -> bool:
    return (
        candidate.family in (socket.AF_INET, socket.AF_INET6)
        and candidate.type == socket.SOCK_STREAM
        and not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and candidate.getsockname()[1] in ports
    )


def _others(ports: frozenset[int], accepted: Collection[int]) -> bool:
    """Whether the kernel has connections to these ports that the process has not taken yet, but may still take."""
    return any(
        (row.state == _LISTEN and row.backlog > 0)
        or (row.state in (_ESTABLISHED, _SYN_RECV, _CLOSE_WAIT) and row.inode not in accepted)
        for row in _rows(ports)
    )


class _Row(NamedTuple):
    """A line of /proc/net/tcp. backlog: for a listening socket, how many connections wait to be accepted."""

    state: str
    backlog: int
    inode: int


def _rows(ports: frozenset[int]) -> Iterator[_Row]:
    """Those of the network that have one of these ports on this side."""
    endings = tuple(f":{port:04X}" for port in ports)
    for table in _TABLES:
        # Without IPv6 there is only one.
        with suppress(FileNotFoundError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, rest = line.split(maxsplit=4)
                if local.endswith(endings):
                    queues, _, _, _, _, inode, *_ = rest.split()
                    yield _Row(state, int(queues.rpartition(":")[2], 16), int(inode))
