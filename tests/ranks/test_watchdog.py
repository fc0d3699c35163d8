"""A rank whose loop stops turning is found, and no other one."""

import os
from collections.abc import Iterator

import pytest

from ranks.status import SharedStatus
from ranks.watch import GRACE_S, Watchdog

STEP_TIMEOUT_S = 3.0
LOOK_EVERY_S = 0.25
PATIENCE = round((STEP_TIMEOUT_S + GRACE_S) / LOOK_EVERY_S)
"""Looks after which a rank hangs."""


class Host:
    """Ranks 1 and 2 of three, looked at again and again by a clock of its own."""

    def __init__(self, status: SharedStatus) -> None:
        self.status = status
        self.now = 1000.0
        self._hung = Watchdog(status, (1, 2), STEP_TIMEOUT_S, LOOK_EVERY_S)

    def look(self, times: int, *turning: int, seconds: float = LOOK_EVERY_S) -> int | None:
        """So many looks, before each of which these ranks turn."""
        found = None
        for _ in range(times):
            for rank in turning:
                self.status.turn(rank)
            self.now += seconds
            found = self._hung.look(self.now)
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    fd = SharedStatus.create(3)
    status = SharedStatus(fd, 3)
    yield Host(status)
    os.close(fd)


def test_a_rank_whose_loop_does_not_turn_is_found_behind_the_step_timeout(host: Host) -> None:
    assert host.look(2, 1, 2) is None
    assert host.look(PATIENCE, 1) is None
    assert host.look(1, 1) == 2


def test_only_ranks_of_this_host_that_serve_are_expected_to_turn(host: Host) -> None:
    host.status.turn(0)
    host.status.turn(1)
    host.status.set_done(1)
    assert host.look(10 * PATIENCE) is None, "rank 2 has not begun to serve"


def test_any_turn_gives_a_rank_its_whole_time_again(host: Host) -> None:
    for _ in range(3):
        assert host.look(1, 1, 2) is None
        assert host.look(PATIENCE) is None
    assert host.look(1) == 1


def test_a_pause_of_the_machine_is_nobodys_fault(host: Host) -> None:
    host.look(2, 1, 2)
    assert host.look(1, seconds=3600) is None
    assert host.look(PATIENCE, 1, 2) is None
