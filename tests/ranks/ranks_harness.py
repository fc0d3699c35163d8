"""Ranks of a group as processes of their own, forked from the test."""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cli.serve import free_port
from ranks.executor import LineCodec
from ranks.group import RankGroup
from ranks.place import RankPlace, create_places
from ranks.status import SharedStatus
from ranks.watch import RankWatch

CPU = torch.device("cpu")
TIMEOUT_S = 30.0
JSON: LineCodec[object, object] = LineCodec(lambda value: json.dumps(value).encode(), json.loads)


class FakeWatch(RankWatch):
    """Watches nothing. dead: names the rank that has ended."""

    def __init__(self, dead: Callable[[], int | None] = lambda: None) -> None:
        self.dead = dead  # type: ignore[method-assign]
        self._serving = False
        self._step = None


class ForkedRanks:
    """Runs `body(rank's place)` in a process for each rank. What one raises is written to a file.

    hosts: as many as the ranks are told to be on. They share no status, and meet on the loopback interface.
    """

    def __init__(
        self, size: int, directory: Path, body: Callable[[RankPlace], None], hosts: int = 1, lines: bool = False
    ) -> None:
        meeting = f"127.0.0.1:{free_port()}" if hosts > 1 else ""
        self.places = [place for host in range(hosts) for place in create_places(size, lines, hosts, host, meeting)]
        self.statuses = [SharedStatus(place.status, size) for place in self.places[:: size // hosts]]
        self.status = self.statuses[0]
        self._directory = directory
        self.pids = [self._fork(place, body) for place in self.places]

    def _fork(self, place: RankPlace, body: Callable[[RankPlace], None]) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            # Makes torch's pool of threads anew while there is one thread: two that did it at once would fail.
            torch.set_num_threads(1)
            body(place)
            code = 0
        except BaseException as error:
            self._said(place.rank).write_text(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            os._exit(code)

    def _said(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"

    def said(self, rank: int) -> str:
        """What a rank raised; empty if nothing."""
        path = self._said(rank)
        return path.read_text() if path.exists() else ""

    def wait(self, rank: int, timeout: float = TIMEOUT_S) -> int:
        """The exit code of a rank, below 0 for a signal."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.pids[rank] = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} did not end within {timeout} s")

    def close(self) -> None:
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for descriptor in {descriptor for place in self.places for descriptor in place.descriptors}:
            os.close(descriptor)


@contextmanager
def forked(
    size: int, directory: Path, body: Callable[[RankPlace], None], hosts: int = 1, lines: bool = False
) -> Iterator[ForkedRanks]:
    ranks = ForkedRanks(size, directory, body, hosts, lines)
    try:
        yield ranks
    finally:
        ranks.close()


def join(
    place: RankPlace, step_timeout: float = TIMEOUT_S, wake: Callable[[], None] = lambda: None, **hosts: Any
) -> RankGroup:
    """This process's side of the group, on the CPU. hosts: what a group of several takes besides."""
    return RankGroup(place, CPU, step_timeout, wake, **hosts)
