"""Prompts on their way from device pages to the host tier. (A request retracted while in staging leaked or was freed
twice: sglang PR 22131.)
"""

import random
import threading

import pytest

from hisparse.coordinator import LifecycleError
from tests.hisparse.tiers_harness import Pages, Tiers, tiers


def stage(t: Tiers, request_id: str, seed: int, num_tokens: int = 9) -> Pages:
    pages = Pages(seed, num_tokens)
    slots = t.host_slots(num_tokens)
    t.coordinator.admit_request_into_staging(request_id, slots, pages.staged, num_tokens)
    t.staged_slots[request_id] = slots
    return pages


def settle(t: Tiers) -> None:
    """Wait until the copies submitted so far are over."""
    t.stream.submit(lambda: None).result()


def test_staging_does_not_hold_up_the_step_loop() -> None:
    with tiers() as t:
        gate = threading.Event()
        t.stream.submit(lambda: gate.wait() and None)
        pages = stage(t, "staged", seed=1)
        assert t.admit("running", seed=2, num_tokens=9)
        t.step(["running"], random.Random(0))
        assert t.coordinator.staging.poll().landed == []
        assert pages.released == 0
        gate.set()
        settle(t)
        assert t.coordinator.staging.poll().landed == ["staged"]


def test_a_request_aborted_during_its_copy_is_freed_once_after_it() -> None:
    with tiers() as t:
        gate = threading.Event()
        t.stream.submit(lambda: gate.wait() and None)
        pages = stage(t, "r", seed=1)
        assert t.coordinator.staging.abort("r")
        assert not t.coordinator.staging.abort("r"), "a second abort has nothing to do"
        assert t.coordinator.staging.poll().landed == []
        assert (pages.released, t.host.used) == (0, 9), "the copy may still touch them"
        assert len(t.coordinator.staging) == 1
        assert not t.coordinator.is_idle()
        again = stage(t, "r", seed=2)
        gate.set()
        settle(t)
        assert t.coordinator.staging.poll().landed == ["r"]
        assert (pages.released, again.released, t.host.used) == (1, 1, 9)


def test_a_request_in_staging_is_not_running() -> None:
    with tiers() as t:
        pages = stage(t, "r", seed=1)
        with pytest.raises(LifecycleError, match="request r is in staging, not running"):
            t.coordinator.retract_request("r")
        with pytest.raises(LifecycleError, match="request r is here already"):
            t.coordinator.admit_request_into_staging("r", t.host_slots(9), pages.staged, 9)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_walk_in_staging_nothing_is_left_or_freed_twice(seed: int) -> None:
    rng = random.Random(seed)
    with tiers() as t:
        all_pages: list[Pages] = []
        names: dict[str, int] = {}
        gate = threading.Event()
        for turn in range(80):
            action = rng.choice(["stage", "abort", "poll", "block", "open"])
            if action == "stage" and t.host.free >= 9:
                all_pages.append(stage(t, f"r{turn}", turn))
                names[f"r{turn}"] = turn
            elif action == "abort" and names:
                name = rng.choice(list(names))
                assert t.coordinator.staging.abort(name)
                del names[name]
            elif action == "poll":
                collect(t, names)
            elif action == "block" and not gate.is_set():
                t.stream.submit(lambda held=gate: held.wait() and None)
            elif action == "open":
                gate.set()
                gate = threading.Event()
            assert all(pages.released <= 1 for pages in all_pages)
        gate.set()
        settle(t)
        collect(t, names)
        assert not names
        assert all(pages.released == 1 for pages in all_pages)
        assert t.coordinator.is_idle()


def collect(t: Tiers, names: dict[str, int]) -> None:
    """Check what was staged and give its host slots back."""
    for request_id in t.coordinator.staging.poll().landed:
        slots = t.staged_slots.pop(request_id)
        t.check_host_copy(slots, names.pop(request_id), 9)
        t.host.release(slots)
