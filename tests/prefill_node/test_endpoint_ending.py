"""A prefill node that drains, ends, or has lost its device."""

from collections.abc import Callable

import pytest

from base.device import DeviceFailed
from control.messages import Admitted, Message, PrefillDone, PrefillFailed
from prefill_node import endpoint
from service.lifecycle import Lifecycle
from tests.prefill_node.world import R, World, request


@pytest.fixture(autouse=True)
def no_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.0)


def test_a_node_that_drains_hands_back_what_it_has_not_begun() -> None:
    h = World()
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="waits")))
    h.compute()
    done: list[type[Message]] = []
    turns = h.script(
        lambda: h.receive(request(attempt=R._replace(request_id="late"))),
        h.finish,
        h.sent,
        h.sent,
        lambda: done.extend(type(message) for _, message in h.control.repeated.values()),
        lambda: h.receive(Admitted(attempt=R)),
    )
    h.lifecycle.drain()
    h.endpoint.run()
    assert h.has_left
    assert not turns, "it ended before it had nothing left"
    assert done == [PrefillDone]
    handed_back = h.control.take(PrefillFailed)
    assert [(failed.attempt.request_id, failed.leaving, failed.in_flight) for failed in handed_back] == [
        ("waits", True, False),
        ("late", True, False),
    ]
    assert len(h.held) == 0
    assert h.free_pages == 8


def test_a_node_that_ends_hands_everything_back_after_its_writes() -> None:
    h = World()
    h.receive(request())
    h.compute()
    turns = h.script(lambda: h.receive(request(attempt=R._replace(request_id="late"))), lambda: h.sent(error="aborted"))
    h.lifecycle.end()
    h.endpoint.run()
    assert not turns
    assert len(h.held) == 0
    assert [(failed.attempt.request_id, failed.leaving) for failed in h.control.take(PrefillFailed)] == [
        ("late", True),
        ("r", True),
    ]
    assert h.free_pages == 8


@pytest.mark.parametrize("stop", [Lifecycle.drain, Lifecycle.end])
def test_a_node_with_nothing_to_do_refuses_for_a_while_before_it_leaves(
    stop: Callable[[Lifecycle], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node that asked a process which is gone would keep its slots in quarantine. SIGINT is no exception."""
    monkeypatch.setattr(endpoint, "_FAREWELL_S", 0.2)
    h = World()
    turns = h.script(lambda: None, lambda: h.receive(request()))
    stop(h.lifecycle)
    h.endpoint.run()
    assert not turns
    [failed] = h.control.take(PrefillFailed)
    assert failed.leaving


def test_what_has_not_ended_by_the_drain_timeout_is_handed_back() -> None:
    h = World()
    h.receive(request())
    h.compute()
    turns = h.script(h.sent, h.lifecycle.end, h.finish, lambda: h.sent(error="aborted"))
    h.lifecycle.drain()
    h.endpoint.run()
    assert not turns
    [failed] = h.control.take(PrefillFailed)
    assert (failed.reason, failed.leaving) == ("the prefill node is stopping", True)


def test_a_node_whose_device_has_failed_hands_everything_back_and_ends() -> None:
    """It would answer fast with errors, have the shortest queue, and draw all requests."""
    h = World()
    failure = DeviceFailed("cuda:0 cannot be used any more: an illegal memory access was encountered")
    h.receive(request())
    h.receive(request(attempt=R._replace(request_id="waits")))
    h.start()
    turns = h.script(
        lambda: h.finish("prefill failed: an illegal memory access", device_failed=failure),
        lambda: h.sent(error="aborted"),
    )
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        h.endpoint.run()
    assert not turns
    assert h.has_left, "gateways hear that it takes no more"
    assert h.planner.has_failed
    assert [(failed.attempt.request_id, failed.leaving) for failed in h.control.take(PrefillFailed)] == [
        ("waits", True),
        ("r", True),
    ]
    assert h.free_pages == 8
