"""Which prefill node is asked."""

import time

import pytest

from control.messages import Generate, PrefillFailed
from decode_node.request import Request
from tests.decode_node.remote_world import FIRST, SECOND, SLOTS, Lost, R, RemoteWorld
from tests.decode_node.world import GATEWAY


def test_a_node_that_leaves_hands_a_request_back_without_a_fault(h: RemoteWorld) -> None:
    """Were it counted, a rolling update would use up the attempts of what it meets."""
    for node in (FIRST, SECOND):
        h.dispatch(node)
        [lost] = h.take(node, PrefillFailed(attempt=R._replace(epoch=h.request.epoch), reason="draining", leaving=True))
        assert lost == Lost(h.request, "draining")
    assert h.freed == [SLOTS, SLOTS]
    assert h.request.prefill_failures == 0
    assert h.failures("prefill") == 0
    assert h.remote.nodes.choose(h.request) is None, "neither takes another request"


def test_a_node_that_a_gateway_calls_leaving_is_not_asked(h: RemoteWorld) -> None:
    h.remote.nodes.retire(FIRST.boot_id)
    assert h.remote.nodes.choose(h.request) == SECOND
    again = FIRST.model_copy(update={"boot_id": "first again"})
    h.remote.nodes.learn(GATEWAY.address, (again, SECOND), {})
    assert h.remote.nodes.choose(h.request) == again, "the process that took its address is another one"


def test_a_node_whose_key_was_revoked_is_not_asked(h: RemoteWorld) -> None:
    """A request may name it, from before; it must not see another prompt."""
    h.control.revoked = {FIRST.boot_id}
    assert h.remote.nodes.choose(h.request) == SECOND
    h.control.revoked = {FIRST.boot_id, SECOND.boot_id}
    assert h.remote.nodes.choose(h.request) is None


def test_when_all_were_tried_the_best_is_tried_again(h: RemoteWorld) -> None:
    for node in (FIRST, SECOND):
        h.dispatch(node)
        h.take(node, PrefillFailed(attempt=R._replace(epoch=h.request.epoch), reason="no"))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_gateways_name_nodes_that_the_request_did_not(h: RemoteWorld) -> None:
    request = Request(Generate(request_id="q", prompt_ids=(1,), max_new_tokens=1), GATEWAY)
    assert h.remote.nodes.choose(request) is None
    h.remote.nodes.learn(GATEWAY.address, (SECOND,), {})
    assert h.remote.nodes.choose(request) == SECOND


def test_a_ranking_from_before_a_restart_is_brought_up_to_date(h: RemoteWorld) -> None:
    reborn = FIRST.model_copy(update={"boot_id": "reborn"})
    h.remote.nodes.learn(GATEWAY.address, (reborn,), {})
    assert h.remote.nodes.choose(h.request) == reborn


def test_a_gateway_that_died_does_not_keep_the_old_boot_of_a_node_alive(h: RemoteWorld) -> None:
    """What it said last is older than what another gateway says, whichever spoke first."""
    reborn = FIRST.model_copy(update={"boot_id": "reborn"})
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    h.remote.nodes.learn("gateway:2", (FIRST,), {})
    h.remote.nodes.learn(GATEWAY.address, (reborn,), {})
    assert h.remote.nodes.choose(h.request) == reborn


def test_what_a_silent_gateway_said_is_forgotten_when_others_speak(
    h: RemoteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    h.remote.nodes.learn("gateway:2", (SECOND,), {})
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    assert h.remote.nodes.known == {FIRST, SECOND}
    later = time.monotonic() + 60
    monkeypatch.setattr("decode_node.prefill_nodes.time.monotonic", lambda: later)
    assert h.remote.nodes.known == {FIRST, SECOND}, "while nobody speaks"
    h.remote.nodes.learn(GATEWAY.address, (FIRST,), {})
    assert h.remote.nodes.known == {FIRST}


def test_only_nodes_that_take_so_long_a_prompt_are_asked(h: RemoteWorld) -> None:
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {"first": 2, "second": 3})
    assert h.remote.nodes.choose(h.request) == SECOND
    h.remote.nodes._faults_of(SECOND).silent_since = time.monotonic()
    assert h.remote.nodes.choose(h.request) is None, "it waits for the node that can"
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {"first": 2, "second": 2})
    assert h.remote.nodes.choose(h.request) == FIRST, "nobody can, which it will say"
