"""Rows that have all of their items in hot slots: how they come to that, and how they give slots back."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hisparse import filling, resident_rows
from hisparse.device_pool import DeviceKVPool
from hisparse.filling import FillEnd, RowFiller
from tests.hisparse.test_coordinator import Walk
from tests.hisparse.tiers_harness import CONTEXT, HOT, LAYOUT, Tiers, tiers

PART = 3
CALM = 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills take several parts, although contexts are short here."""
    monkeypatch.setattr(filling, "_PART_BYTES", PART * LAYOUT.num_layers * LAYOUT.item_bytes)
    monkeypatch.setattr(filling, "_CATCH_UP", 2)
    monkeypatch.setattr(filling, "_LEAST_SLACK", 12)
    monkeypatch.setattr(resident_rows, "_CALM_STEPS", CALM)


class Held:
    """A copy that runs when the test says so."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._done = copy, False

    def run(self) -> None:
        self._copy()
        self._done = True

    def done(self) -> bool:
        return self._done

    def result(self) -> None:
        assert self._done


class HeldCopies:
    """A copy stream whose copies wait for the test."""

    def __init__(self) -> None:
        self.held: list[Held] = []

    def submit(self, copy: Callable[[], None], /) -> Held:
        self.held.append(Held(copy))
        return self.held[-1]

    def run(self) -> None:
        for copy in self.held:
            copy.run()
        self.held.clear()

    def shutdown(self) -> None:
        self.run()


@contextmanager
def held_tiers(**sizes: Any) -> Iterator[tuple[Tiers, HeldCopies]]:
    with tiers(resident_rows=True, **sizes) as t:
        stream = HeldCopies()
        t.coordinator.residents.filler = RowFiller(t.coordinator._backend, stream)
        yield t, stream
        stream.run()


def fill(t: Tiers, stream: HeldCopies) -> None:
    """Turns without steps, until no row is being filled."""
    t.coordinator.fill_rows()
    while not t.coordinator.residents.filler.is_idle:
        stream.run()
        t.coordinator.fill_rows()


def misses(t: Tiers) -> int:
    return t.coordinator.counters().misses


def test_a_long_row_becomes_resident_while_it_decodes() -> None:
    with held_tiers() as (t, stream):
        assert t.admit("long", seed=1, num_tokens=20)
        rng, turns = random.Random(0), 0
        while not t.device.is_resident(t.coordinator.row("long")):
            t.step(["long"], rng)
            stream.run()
            turns += 1
        assert 20 // PART <= turns < 15, "a part in each turn"
        before = misses(t)
        assert before > 0
        while t.tokens["long"] < CONTEXT:
            t.step(["long"], rng)
        assert misses(t) == before
        t.coordinator.release_host(t.coordinator.retract_request("long"))
        assert t.coordinator.is_idle()


def test_a_short_row_stays_resident_as_it_grows() -> None:
    with tiers(resident_rows=True) as t:
        assert t.admit("short", seed=1, num_tokens=2)
        rng = random.Random(0)
        while t.tokens["short"] < CONTEXT:
            t.step(["short"], rng)
        assert misses(t) == 0


def test_the_longest_resident_row_gives_way_to_an_admission() -> None:
    with held_tiers(num_device_slots=2 * CONTEXT + 6) as (t, stream):
        for name, num_tokens in (("a", 18), ("b", 24)):
            assert t.admit(name, seed=num_tokens, num_tokens=num_tokens)
            fill(t, stream)
        rows = {name: t.coordinator.row(name) for name in "ab"}
        assert t.device.resident_rows == 2
        for number in range(4):
            assert t.admit(f"new{number}", seed=number, num_tokens=20), "resident rows keep nobody out"
        assert not t.device.is_resident(rows["b"])
        rng = random.Random(0)
        for _ in range(10):
            t.step(["a", "b", "new0"], rng)
        for name in ("a", "b", *(f"new{number}" for number in range(4))):
            t.coordinator.release_host(t.coordinator.retract_request(name))
        assert t.coordinator.is_idle()


@pytest.mark.parametrize("n", [30, 31])
def test_a_row_that_gave_slots_back_keeps_its_newest_items(n: int) -> None:
    """Slabs have two slots: of 31 tokens, the row keeps a slot of one that is still to come."""
    with held_tiers() as (t, stream):
        assert t.admit("r", seed=1, num_tokens=n)
        fill(t, stream)
        assert t.reclaim()
        t.step(["r"], random.Random(0), selected=[n, n - 1, n - 2, n - 3])
        assert misses(t) == 0
        t.step(["r"], random.Random(0), selected=[n + 1, 2, n, -1])
        assert misses(t) == 2 * LAYOUT.num_index_layers, "a position was computed after that"


def test_a_resident_row_without_room_to_grow_becomes_a_long_one() -> None:
    with tiers(resident_rows=True, num_device_slots=HOT + 4) as t:
        assert t.admit("r", seed=1, num_tokens=3)
        rng = random.Random(0)
        while t.tokens["r"] < CONTEXT:
            t.step(["r"], rng)
        assert not t.device.is_resident(t.coordinator.row("r"))
        assert misses(t) > 0


def test_after_a_row_gave_slots_back_none_is_filled_for_a_while() -> None:
    with held_tiers() as (t, stream):
        assert t.admit("r", seed=1, num_tokens=20)
        fill(t, stream)
        assert t.reclaim()
        rng = random.Random(0)
        for _ in range(CALM):
            assert t.coordinator.residents.filler.is_idle
            t.step(["r"], rng)
        assert t.coordinator.residents.filler.row == t.coordinator.row("r")


def test_after_a_row_outgrew_its_fill_none_begins_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_LEAST_SLACK", 0)
    with held_tiers() as (t, stream):
        assert t.admit("r", seed=1, num_tokens=14)
        rng = random.Random(0)
        t.coordinator.fill_rows()
        for _ in range(t.device.slab.slots + 1):
            t.step(["r"], rng)
        assert t.coordinator.residents.filler.row == t.coordinator.row("r"), "its first part is being copied"
        stream.run()
        t.coordinator.fill_rows()
        assert t.coordinator.residents.filler.ends == {FillEnd.OUTGROWN: 1}
        for _ in range(CALM):
            assert t.coordinator.residents.filler.is_idle
            t.step(["r"], rng)
        assert t.coordinator.residents.filler.row == t.coordinator.row("r")
        assert not t.device.is_resident(t.coordinator.row("r"))


@pytest.mark.parametrize("more", [9, 10])
def test_a_row_that_is_about_to_end_is_not_filled(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_rows, "_FETCHED", 2)
    with held_tiers() as (t, _):
        assert t.admit("r", seed=1, num_tokens=20, limit=20 + more)
        t.coordinator.fill_rows()
        assert t.coordinator.residents.filler.is_idle == (2 * more < 20)


@pytest.mark.parametrize(
    ("why", "end"),
    [("finished", FillEnd.LEFT), ("retracted", FillEnd.LEFT), ("short of slots", FillEnd.RECLAIMED)],
)
def test_slots_of_a_fill_are_free_only_after_its_copy(why: str, end: FillEnd) -> None:
    with held_tiers() as (t, stream):
        assert t.admit("r", seed=1, num_tokens=20)
        free = t.device.free_slots
        t.coordinator.fill_rows()
        taken = free - t.device.free_slots
        assert taken >= 20
        if why == "finished":
            t.coordinator.release_host(t.coordinator.retract_request("r"))
        elif why == "retracted":
            t.host.release(t.coordinator.retract_request("r"))
        else:
            assert not t.reclaim()
            assert not t.reclaim(), "what is abandoned is counted once"
        assert t.coordinator.residents.filler.ends == {end: 1}
        t.coordinator.check_integrity()
        assert t.coordinator.residents.filler.row is None
        of_row = HOT + 2 if why == "short of slots" else 0
        assert t.device.used_slots == of_row + taken
        stream.run()
        t.coordinator.residents.filler.poll()
        assert t.device.used_slots == of_row
        assert t.coordinator.residents.filler.is_idle


def test_a_copy_that_fails_costs_the_row_nothing() -> None:
    with held_tiers() as (t, stream):
        assert t.admit("r", seed=1, num_tokens=20)
        t.coordinator.fill_rows()

        def fail() -> None:
            raise RuntimeError("no copy engine")

        [copy] = stream.held
        copy.run()
        copy.result = fail  # type: ignore[method-assign]
        t.coordinator.fill_rows()
        assert t.coordinator.residents.filler.is_idle
        assert t.coordinator.residents.filler.ends == {FillEnd.FAILED: 1}
        t.step(["r"], random.Random(0))
        t.coordinator.release_host(t.coordinator.retract_request("r"))
        assert t.coordinator.is_idle()


@pytest.mark.parametrize("shares_slabs", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_rows_that_grow_and_shrink_read_right_bytes_and_leave_nothing(
    seed: int, shares_slabs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step compares each selected item with what its sequence has there."""
    seen: Counter[str] = Counter()
    for name in ("make_resident", "make_long", "drop"):
        original = getattr(DeviceKVPool, name)

        def counting(pool: DeviceKVPool, *given: Any, name: str = name, original: Any = original) -> Any:
            seen[name] += 1
            return original(pool, *given)

        monkeypatch.setattr(DeviceKVPool, name, counting)
    rng = random.Random(seed)
    num_slots, pages = rng.choice([90, 130]), 10 if shares_slabs else 70
    sizes = {"num_host_slots": 260, "num_index_pages": pages, "shares_slabs": shares_slabs}
    with held_tiers(num_device_slots=num_slots, **sizes) as (t, stream):
        walk = Walk(t, rng)
        for _ in range(300):
            walk.resume()
            if len(walk.running) < 5 and rng.random() < 0.4:
                walk.admit()
            for request_id in list(walk.running):
                if t.tokens[request_id] == CONTEXT or rng.random() < 0.02:
                    walk.finish(request_id)
            short_of = t.coordinator.append_tokens(walk.running)
            if short_of or rng.random() < 0.01:
                for request_id in short_of or walk.running[:1]:
                    walk.retract(request_id)
            elif walk.running:
                t.step(walk.running, rng)
            if rng.random() < 0.9:
                stream.run()
            t.coordinator.check_integrity()
        for request_id in list(walk.running):
            walk.finish(request_id)
        walk.drop_retracted()
        stream.run()
        assert t.coordinator.counters().violations == 0
        assert t.coordinator.is_idle()
        assert t.device._slabs.used == 0
    assert seen["make_resident"] > 10
    assert seen["make_long"] > 0
    assert seen["drop"] > 2
