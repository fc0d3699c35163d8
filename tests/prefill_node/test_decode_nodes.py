"""Which decode nodes are asked for signs of life, and when one is given up."""

import pytest

from control.messages import Peer
from prefill_node.lanes import DecodeNodes
from tests.prefill_node.fakes import FakeControl

FIRST, SECOND = (Peer(role="decode", address=f"127.0.0.1:{port}", boot_id=f"{port}") for port in (1, 2))


def test_a_decode_node_is_watched_for_a_minute_after_the_last_thing_that_it_had_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("prefill_node.lanes.time.monotonic", lambda: now)
    control = FakeControl()
    nodes = DecodeNodes(control)  # type: ignore[arg-type]
    nodes.watch([FIRST, FIRST])
    assert control.watched == {FIRST}
    now += 30
    nodes.watch([SECOND])
    assert control.watched == {FIRST, SECOND}
    now += 31
    nodes.watch([])
    assert control.watched == {SECOND}, "it will probably come back, and its next prompt would wait"
    now += 31
    nodes.watch([])
    assert control.watched == set()


def test_a_decode_node_is_silent_when_it_was_not_heard_for_ten_seconds_or_never() -> None:
    nodes = DecodeNodes(FakeControl(heard={FIRST.boot_id: 100.0}))  # type: ignore[arg-type]
    assert not nodes.is_silent(FIRST, 109.0)
    assert nodes.is_silent(FIRST, 111.0)
    assert nodes.is_silent(SECOND, 100.0)
