"""A plain model of docs/drafts.md: tokens of requests, and owners of host slots, while two steps are in flight.

Nothing is computed. The coordinator has to agree with the model, whatever is admitted, launched, read, ended or
retracted in whichever order.
"""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.coordinator import StepPlaces
from kvcache.extents import HostSlots
from tests.hisparse.tiers_harness import CONTEXT, tiers

NUM_HOST_SLOTS = 90


@dataclass
class Sequence:
    """tokens: those that were read. unread: of each step in flight, those that it gives at most."""

    tokens: int
    limit: int
    unread: dict[int, int] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return self.tokens + sum(self.unread.values())


@dataclass
class Flight:
    """A step in flight. slots: host slots that it may write to, whatever became of its requests."""

    places: StepPlaces
    ids: tuple[str, ...]
    slots: frozenset[int]


class StepsInFlight(RuleBasedStateMachine):
    @initialize(drafts=st.integers(0, 3), resident_rows=st.booleans())
    def start(self, drafts: int, resident_rows: bool) -> None:
        self.cleanup = ExitStack()
        self.window, self.width = max(1, 2 * drafts), 1 + drafts
        sizes = {"num_host_slots": NUM_HOST_SLOTS, "num_device_slots": 36, "num_index_pages": 24, "max_requests": 4}
        made = tiers(**sizes, resident_rows=resident_rows, window=self.window, verify=False)  # type: ignore[arg-type]
        self.tiers = self.cleanup.enter_context(made)
        self.coordinator = self.tiers.coordinator
        self.running: dict[str, Sequence] = {}
        self.retracted: dict[str, tuple[Sequence, HostSlots]] = {}
        self.flights: deque[Flight] = deque()
        self.leaving: list[tuple[int, int]] = []
        """Host slots that were given up, as (the last step that was begun then, how many)."""
        self.begun = self.over = self.names = 0

    @rule(tokens=st.integers(0, 30), more=st.integers(1, 40))
    def admit(self, tokens: int, more: int) -> None:
        slots = self.tiers.host.allocate(tokens + 1)
        if slots is None:
            return
        busy = frozenset().union(*(flight.slots for flight in self.flights))
        assert busy.isdisjoint(slots.slots().tolist()), "a step in flight may still write there"
        self.names += 1
        name, limit = f"r{self.names}", min(tokens + more, CONTEXT)
        if self.coordinator.admit_request_direct(name, slots, tokens, limit):
            self.running[name] = Sequence(tokens, limit)
        else:
            self.tiers.host.release(slots)

    @property
    def ready(self) -> list[str]:
        """Requests that want another step."""
        return [name for name, one in self.running.items() if one.most < one.limit]

    @precondition(lambda self: len(self.flights) < 2 and self.ready)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.ready), min_size=1, unique=True))
        short = self.coordinator.append_tokens(ids)
        ids = [name for name in ids if name not in short]
        if not ids:
            return
        places = self.coordinator.begin_step(ids, data.draw(st.integers(1, self.width)))
        self.begun += 1
        assert places.number == self.begun
        slots: set[int] = set()
        for name, end, most in zip(ids, places.ends.tolist(), places.most.tolist(), strict=True):
            one = self.running[name]
            held = self.coordinator.host_slots(name).slots()
            assert one.most < end <= min(one.limit, len(held)), "at least one token, all of them with room"
            assert most == min(places.width, end - one.most)
            slots.update(held[one.tokens : one.most + self.window].tolist())
            one.unread[places.number] = most
        assert places.longest <= CONTEXT
        self.flights.append(Flight(places, tuple(ids), frozenset(slots)))
        self.coordinator.fill_rows()

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fails=st.sampled_from([False] * 7 + [True]))
    def read(self, data: st.DataObject, fails: bool) -> None:
        if fails:
            self._give_up()
            return
        flight = self.flights.popleft()
        most = flight.places.most.tolist()
        counts = {name: data.draw(st.integers(min(1, m), m)) for name, m in zip(flight.ids, most, strict=True)}
        self.coordinator.step_over(flight.places, counts)
        for name, count in counts.items():
            # One that was retracted keeps the tokens that it was about to get.
            if one := self._alive(name):
                del one.unread[flight.places.number]
                one.tokens += count
        self.over = flight.places.number

    @precondition(lambda self: len(self.running) > 2)
    @rule(data=st.data(), retracts=st.booleans())
    def leave(self, data: st.DataObject, retracts: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if retracts:
            self.retracted[name] = self.running.pop(name), self.coordinator.retract_request(name)
        else:
            self._finish(name)

    @precondition(lambda self: self.retracted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.retracted)))
        one, slots = self.retracted[name]
        if not one.unread and self.coordinator.admit_request_direct(name, slots, one.tokens, one.limit):
            self.running[name] = one
            del self.retracted[name]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tiers"):
            return
        held = {name: self.coordinator.host_slots(name) for name in self.running}
        held |= {name: slots for name, (_, slots) in self.retracted.items()}
        for name, one in self.running.items():
            assert self.coordinator.num_tokens(name) == one.tokens
            assert len(held[name]) >= one.most
        owned = np.concatenate([np.empty(0, np.int64), *(slots.slots() for slots in held.values())])
        assert len(np.unique(owned)) == len(owned)
        leaving = sum(count for number, count in self.leaving if number > self.over)
        assert self.coordinator.releasing_slots == leaving
        assert self.tiers.host.used == len(owned) + leaving
        self.coordinator.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        while self.flights:
            self._give_up()
        for name in [*self.running, *self.retracted]:
            self._finish(name)
        self.tiers.stream.shutdown()
        assert self.coordinator.is_idle()
        self.cleanup.close()

    def _give_up(self) -> None:
        """The oldest step has failed, with all of its requests."""
        flight = self.flights.popleft()
        for name in flight.ids:
            if self._alive(name):
                self._finish(name)
        self.coordinator.step_over(flight.places)
        self.over = flight.places.number

    def _alive(self, name: str) -> Sequence | None:
        """A request that runs or was retracted, and has not ended."""
        one, _ = self.retracted.get(name, (None, None))
        return self.running.get(name, one)

    def _finish(self, name: str) -> None:
        """Ends a request that runs or was retracted."""
        if self.running.pop(name, None) is not None:
            slots = self.coordinator.host_slots(name)
            self.coordinator.release_host(self.coordinator.retract_request(name))
        else:
            _, slots = self.retracted.pop(name)
            self.coordinator.release_host(slots)
        if self.begun > self.over:
            self.leaving.append((self.begun, len(slots)))


TestStepsInFlight: Any = StepsInFlight.TestCase
TestStepsInFlight.settings = settings(max_examples=60, stateful_step_count=60)
