"""Runs traces through allocators and notes in how many extents each prompt's reservation comes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fragmentation.allocators import ALLOCATORS, Allocator
from benchmarks.fragmentation.churn import Event, Kind, Load, trace


@dataclass(frozen=True)
class Reservations:
    """Of every prompt of a trace, in order: when it came (seconds), its tokens, and its extents."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]
    extents: NDArray[np.int64]

    def between(self, start: float, stop: float) -> "Reservations":
        """Those that came at start <= seconds < stop."""
        first, last = np.searchsorted(self.seconds, (start, stop))
        return Reservations(self.seconds[first:last], self.tokens[first:last], self.extents[first:last])


@dataclass(frozen=True)
class Outcome:
    load: Load
    allocator: str
    reservations: Reservations

    @property
    def first_hour(self) -> Reservations:
        return self.reservations.between(0, 3600)

    @property
    def last_hour(self) -> Reservations:
        end = self.load.hours * 3600
        return self.reservations.between(end - 3600, end)


def replay(allocator: Allocator, events: Iterable[Event]) -> Reservations:
    """Ask the allocator for what the events ask for."""
    held: dict[int, Any] = {}
    notes: list[tuple[float, int, int]] = []
    for event in events:
        match event.kind:
            case Kind.RESERVE:
                holding = held[event.request] = allocator.reserve(event.count)
                notes.append((event.seconds, event.count, allocator.extents(holding)))
            case Kind.GROW:
                held[event.request] = allocator.grow(held[event.request], event.count)
            case Kind.RELEASE:
                allocator.release(held.pop(event.request))
    seconds, tokens, extents = (np.array(column) for column in zip(*notes, strict=True))
    return Reservations(seconds, tokens, extents)


def simulate(load: Load) -> list[Outcome]:
    """Every allocator under the same load."""
    events = list(trace(load))
    return [Outcome(load, name, replay(kind(load.num_slots), events)) for name, kind in ALLOCATORS.items()]
