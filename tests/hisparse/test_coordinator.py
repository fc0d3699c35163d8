"""Requests through the KV tiers: admission, decoding, leaving, and nothing left behind."""

import random

import pytest
import torch

from hisparse.coordinator import LifecycleError, Tier
from hisparse.step import StepError, SwapInMismatchError
from hisparse.swap_in import SwapInCounters
from kvcache.extents import HostSlots
from tests.hisparse.tiers_harness import CONTEXT, HOT, LAYOUT, Tiers, item, items, tiers


def test_a_short_request_grows_seamlessly_into_a_long_one() -> None:
    with tiers() as t:
        assert t.admit("short", seed=1, num_tokens=2)
        rng = random.Random(0)
        for _ in range(HOT - 2):
            t.step(["short"], rng)
        assert t.coordinator.counters().misses == 0, "while it fits the hot buffer everything is a hit"
        t.step(["short"], rng, selected=[0, 1, HOT - 1, HOT])
        assert t.coordinator.counters().misses == 0, "its first positions stay resident when it outgrows the buffer"
        while t.tokens["short"] < CONTEXT:
            t.step(["short"], rng)
        assert t.coordinator.counters().misses > 0
        with pytest.raises(ValueError, match=f"all of the {CONTEXT} tokens"):
            t.coordinator.append_tokens(["short"])
        slots = t.coordinator.retract_request("short")
        t.check_host_copy(slots, 1, CONTEXT)
        t.host.release(slots)
        assert t.coordinator.is_idle()


def test_a_long_request_starts_empty_and_fills_by_misses() -> None:
    with tiers() as t:
        assert t.admit("long", seed=1, num_tokens=20)
        step = t.begin(["long"])
        selected = torch.tensor([[3, 20, 3, 7]])
        step.append(0, items([item(1, 0, 20)]))
        slots = step.swap_in(0, selected)
        assert slots[0, 0] == slots[0, 2]
        counters = t.coordinator.counters()
        assert (counters.hits, counters.misses, counters.bytes) == (2, 2, 2 * LAYOUT.item_bytes)


def test_a_short_request_owns_only_what_it_needs() -> None:
    with tiers(num_device_slots=8 + 2) as t:
        assert t.admit("long", seed=1, num_tokens=20)
        assert t.admit("short", seed=2, num_tokens=2)
        assert t.device.free_slots == 0
        assert t.coordinator.append_tokens(["long", "short"]) == {"short": Tier.DEVICE}


def test_a_refused_admission_holds_nothing() -> None:
    for full in ({"num_device_slots": 4}, {"num_device_slots": 8, "num_index_pages": 3}, {"max_requests": 0}):
        with tiers(**full) as t:
            slots = t.host_prompt(1, 20)
            assert slots is not None
            assert not t.coordinator.admit_request_direct("r", slots, 20)
            assert t.host.used == 20
            t.host.release(slots)
            assert t.coordinator.is_idle()


def test_full_pools_say_which_tier_is_short_and_take_nothing() -> None:
    with tiers(num_host_slots=9, num_device_slots=10, num_index_pages=5) as t:
        assert t.admit("a", seed=1, num_tokens=4)
        assert t.admit("b", seed=2, num_tokens=4)
        assert t.coordinator.append_tokens(["a", "b"]) == {"b": Tier.HOST}
        assert t.coordinator.append_tokens(["a"]) == {}, "idempotent: the room is there"
        assert t.device._slabs.free == 10 - 4 - 3
        with pytest.raises(StepError, match="request b has no room for token 4"):
            t.coordinator.begin_step(["a", "b"])
        t.coordinator.release_host(t.coordinator.retract_request("a"))
        assert t.admit("c", seed=3, num_tokens=4)
        assert t.admit("d", seed=4, num_tokens=1)
        t.coordinator.release_host(t.coordinator.retract_request("c"))
        assert t.coordinator.append_tokens(["b"]) == {}
        for request_id in ("b", "d"):
            t.coordinator.release_host(t.coordinator.retract_request(request_id))
        assert t.coordinator.is_idle()


def test_two_requests_may_share_host_slots() -> None:
    with tiers() as t:
        slots = t.host_prompt(7, 12)
        assert slots is not None
        t.host.retain(slots)
        for request_id in ("a", "b"):
            t.seeds[request_id], t.tokens[request_id] = 7, 12
            assert t.coordinator.admit_request_direct(request_id, slots, 12)
        rng = random.Random(3)
        for _ in range(5):
            t.step(["a", "b"], rng)
        t.coordinator.release_host(t.coordinator.retract_request("a"))
        t.step(["b"], rng)
        t.coordinator.release_host(t.coordinator.retract_request("b"))
        assert t.coordinator.is_idle()


@pytest.mark.parametrize("break_at_layer", [0, 1, 2, 3, 4])
def test_a_step_that_broke_harms_nobody_once_its_requests_ended(break_at_layer: int) -> None:
    """Layers of a group share residency: the group's first layer must not make the others believe in a copy."""
    with tiers() as t:
        rng = random.Random(break_at_layer)
        assert t.admit("other", seed=3, num_tokens=18)
        for seed in range(4):
            for request_id in ("a", "b"):
                assert t.admit(request_id, seed, num_tokens=18)
            t.step(["a", "b", "other"], rng)
            assert not t.step(["a", "b"], rng, break_at_layer)
            for request_id in ("a", "b"):
                t.coordinator.release_host(t.coordinator.retract_request(request_id))
            t.step(["other"], rng)
        t.coordinator.release_host(t.coordinator.retract_request("other"))
        assert t.coordinator.is_idle()


def test_layers_swap_in_in_turn() -> None:
    with tiers() as t:
        assert t.admit("r", seed=1, num_tokens=9)
        step = t.begin(["r"])
        with pytest.raises(StepError, match="before layer 1 of its group"):
            step.swap_in(2, torch.tensor([[0]]))
        step.swap_in(1, torch.tensor([[0]]))
        with pytest.raises(StepError, match="layer 1 swapped in twice"):
            step.swap_in(1, torch.tensor([[0]]))
        with pytest.raises(StepError, match=r"layers \[0, 2, 3, 4\] did not swap in"):
            step.finish()


@pytest.mark.parametrize("leave", ["finished", "retracted"])
def test_host_slots_are_free_only_after_steps_that_write_to_them(leave: str) -> None:
    """A prefill node would write to them, and the device's copy of the new token would land on top of that."""
    with tiers() as t:
        assert t.admit("r", seed=1, num_tokens=9)
        assert t.admit("other", seed=2, num_tokens=9)
        t.coordinator.append_tokens(["r", "other"])
        first = t.coordinator.begin_step(["r", "other"])
        t.coordinator.append_tokens(["r", "other"])
        second = t.coordinator.begin_step(["r", "other"])
        used = t.host.used
        if leave == "finished":
            t.coordinator.release_host(t.coordinator.retract_request("r"))
        else:
            t.coordinator.release_host(t.coordinator.retract_request("r"))
        assert (t.device.used_rows, t.host.used) == (1, used), "its row is another's, in the order of the device's work"
        released = t.coordinator.releasing_slots
        assert released > 9
        t.coordinator.step_over(first)
        assert t.host.used == used
        t.coordinator.step_over(second)
        assert t.host.used == used - released
        assert t.coordinator.releasing_slots == 0


def test_a_request_may_begin_with_no_tokens() -> None:
    with tiers() as t:
        t.seeds["r"] = 4
        t.tokens["r"] = 0
        assert t.coordinator.admit_request_direct("r", HostSlots(()), 0)
        rng = random.Random(0)
        for _ in range(2 * HOT):
            t.step(["r"], rng)
        t.coordinator.release_host(t.coordinator.retract_request("r"))
        assert t.coordinator.is_idle()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_verify_catches_a_resident_item_that_differs_from_its_host_copy(tier: str) -> None:
    spoil_and_verify(tier)


def spoil_and_verify(tier: str, on: str = "cpu") -> None:
    with tiers(on=on) as t:
        assert t.admit("r", seed=1, num_tokens=9)
        step = t.begin(["r"])
        step.swap_in(0, torch.tensor([[4, 9, -1]], device=on))
        step.verify()
        getattr(t, tier).kv[0] += 1
        with pytest.raises(SwapInMismatchError, match="layer 0, row 0: position 4"):
            step.verify()


def test_verify_refuses_positions_beyond_the_newest() -> None:
    with tiers() as t:
        assert t.admit("r", seed=1, num_tokens=9)
        step = t.begin(["r"])
        step.swap_in(1, torch.tensor([[11]]))
        with pytest.raises(ValueError, match="beyond its query's"):
            step.verify()


def test_what_swap_in_cannot_serve_is_counted_and_copied_from_nowhere() -> None:
    violate_and_count()


def violate_and_count(on: str = "cpu") -> None:
    """Positions that do not exist, and misses without a host slot or a device slot, in the group of layers 1 to 3."""
    with tiers(on=on, verify=False) as t:
        assert t.admit("r", seed=1, num_tokens=20)
        row = t.coordinator.row("r")
        step = t.begin(["r"])

        def swap_in(*positions: int) -> list[int]:
            """The slots of the positions, the same in all layers of the group."""
            on_device = torch.tensor([positions], device=t.device.device)
            [slots] = {tuple(step.swap_in(layer, on_device)[0].tolist()) for layer in (1, 2, 3)}
            return list(slots)

        # Of the three positions that miss, the second has no host slot, and the third takes a place without a slot.
        t.device.host_slot_of[row, 4] = -1
        t.device.hot_granules[row, 2] = -1
        expected = t.device.memory.clone()
        slots = swap_in(3, 4, 5, 21)
        assert [slot >= 0 for slot in slots] == [True, True, False, False]
        for layer in (1, 2, 3):
            t.device.slab.items(expected)[layer, slots[0]] = items([item(1, layer, 3)])[0]
        assert torch.equal(t.device.memory, expected), "nothing but position 3 was copied"
        assert t.coordinator.counters() == SwapInCounters(0, 3, 3 * 3 * LAYOUT.item_bytes, violations=3)

        t.coordinator.check_integrity()
        step = t.begin(["r"])
        assert swap_in(-1, 20, 2**40, -2)[2:] == [-1, -1]
        assert t.coordinator.counters().violations == 5
        t.coordinator.release_host(t.coordinator.retract_request("r"))
        assert t.coordinator.is_idle(), "what was counted once does not keep the pools from being in order"


def test_misuse_is_refused_by_name() -> None:
    with tiers() as t:
        assert t.admit("r", seed=1, num_tokens=4)
        slots = t.host_prompt(2, 4)
        assert slots is not None
        with pytest.raises(LifecycleError, match="request r is here already"):
            t.coordinator.admit_request_direct("r", slots, 4)
        with pytest.raises(ValueError, match="has 5 tokens, 4 host slots"):
            t.coordinator.admit_request_direct("s", slots, 5)
        with pytest.raises(LifecycleError, match="request s is unknown, not running"):
            t.coordinator.release_host(t.coordinator.retract_request("s"))
        with pytest.raises(ValueError, match="distinct requests"):
            t.coordinator.begin_step(["r", "r"])


class Walk:
    """A scheduler that does anything a scheduler may do, at random."""

    def __init__(self, t: Tiers, rng: random.Random) -> None:
        self.t = t
        self.rng = rng
        self.running: list[str] = []
        self.retracted: dict[str, tuple[HostSlots, int]] = {}
        self.names = 0

    def admit(self) -> None:
        self.names += 1
        if self.t.admit(f"r{self.names}", self.names, self.rng.randint(1, 30)):
            self.running.append(f"r{self.names}")

    def step(self) -> None:
        chosen = self.rng.sample(self.running, self.rng.randint(0, len(self.running)))
        ends = [r for r in chosen if self.t.tokens[r] == CONTEXT]
        for request_id in ends:
            self.finish(request_id)
        wanting = [r for r in chosen if r not in ends]
        short_of = self.t.coordinator.append_tokens(wanting)
        if ready := [r for r in wanting if r not in short_of]:
            break_at = self.rng.choice([None, None, None, *range(LAYOUT.num_layers)])
            if not self.t.step(ready, self.rng, break_at):
                for request_id in ready:
                    self.finish(request_id)
        for request_id in short_of:
            self.retract(request_id)

    def finish(self, request_id: str) -> None:
        self.running.remove(request_id)
        self.t.coordinator.release_host(self.t.coordinator.retract_request(request_id))

    def retract(self, request_id: str) -> None:
        self.running.remove(request_id)
        num_tokens = self.t.tokens[request_id]
        slots = self.t.coordinator.retract_request(request_id)
        self.t.check_host_copy(slots, self.t.seeds[request_id], num_tokens)
        self.retracted[request_id] = slots, num_tokens

    def resume(self) -> None:
        for request_id, (slots, num_tokens) in list(self.retracted.items()):
            if self.t.coordinator.admit_request_direct(request_id, slots, num_tokens):
                del self.retracted[request_id]
                self.running.append(request_id)

    def drop_retracted(self) -> None:
        for slots, _ in self.retracted.values():
            self.t.host.release(slots)
        self.retracted.clear()


@pytest.mark.parametrize("seed", range(6))
def test_after_any_walk_every_pool_is_exactly_as_full_as_at_start(seed: int) -> None:
    walk_and_leave_nothing(seed, turns=250)


def walk_and_leave_nothing(seed: int, turns: int, on: str = "cpu") -> None:
    rng = random.Random(seed)
    sizes = {"num_device_slots": 30, "num_index_pages": 32, "max_requests": 5}
    with tiers(num_host_slots=rng.choice([90, 200]), **sizes, on=on) as t:
        walk = Walk(t, rng)
        for _ in range(turns):
            action = rng.choices(["admit", "step", "finish", "retract", "resume", "drop"], [2, 8, 1, 1, 2, 0.2])[0]
            if action == "admit":
                walk.admit()
            elif action == "step" and walk.running:
                walk.step()
            elif action in ("finish", "retract") and walk.running:
                getattr(walk, action)(rng.choice(walk.running))
            elif action == "resume":
                walk.resume()
            elif action == "drop":
                walk.drop_retracted()
            t.coordinator.check_integrity()
        assert t.coordinator.counters().misses > 0
        assert t.coordinator.counters().violations == 0
        for request_id in list(walk.running):
            walk.finish(request_id)
        walk.drop_retracted()
        assert t.coordinator.is_idle()
        assert (t.host.free, t.device._slabs.used) == (t.host.num_slots, 0)
