"""Ways to send a case, all with the same face: plan, post, return when the last byte has landed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.transfer.groups import Group
from benchmarks.transfer.placement import Placement
from transfer.planner import Descriptors


class MethodFailed(Exception):
    """A method could not send, or sent other bytes than it should: its figures would mean nothing."""


@dataclass(frozen=True)
class Run:
    """One transfer of all bytes. seconds: from the first thing done to the last byte landed, planning included."""

    seconds: float
    planning_seconds: float
    descriptors: int


class Method(Protocol):
    """placement: what lies where in the target when `run` has returned."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> Group: ...

    @property
    def placement(self) -> Placement: ...

    def run(self) -> Run:
        """Send everything once. Raises MethodFailed."""
        ...


@dataclass(frozen=True)
class Posting:
    """A method that plans all descriptors and hands them to something that writes them."""

    name: str
    group: Group
    placement: Placement
    plan: Callable[[], Descriptors]
    post: Callable[[Descriptors], None]

    def run(self) -> Run:
        started = time.perf_counter()
        batch = self.plan()
        planned = time.perf_counter()
        self.post(batch)
        return Run(time.perf_counter() - started, planned - started, len(batch.lengths))
