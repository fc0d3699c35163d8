"""A prefill node that fails at everything fails fast, and has the shortest queue: it must not draw all requests."""

import pytest

from control.messages import Generate, Peer, PrefillDone, PrefillFailed
from decode_node.prefill_nodes import FAILURES, TRIAL_AFTER_S
from decode_node.request import Request, RequestState
from tests.decode_node.remote_world import FIRST, SECOND, SLOTS, Clock, RemoteWorld
from tests.decode_node.world import GATEWAY

BROKEN, OTHER = FIRST, SECOND


class Node(RemoteWorld):
    """A decode node's remote prefills. The gateway always names the broken node first."""

    asked = 0

    def new_request(self) -> Request:
        self.asked += 1
        prompt = tuple(range(1, 5))
        generate = Generate(
            request_id=f"r{self.asked}", prompt_ids=prompt, max_new_tokens=4, prefill_nodes=(BROKEN, OTHER)
        )
        return Request(generate, GATEWAY)

    def ask(self, request: Request | None = None) -> tuple[Request, Peer]:
        """Have a request prefilled by the node that is chosen for it."""
        request = request or self.new_request()
        node = self.remote.nodes.choose(request)
        assert node is not None
        self.remote.dispatch(request, node, SLOTS)
        return request, node

    def fail(self, request: Request, node: Peer, **fields: bool) -> None:
        attempt = request.attempt(self.remote._control.me.boot_id)
        self.remote.take(node, PrefillFailed(attempt=attempt, reason="no device", **fields))
        assert self.lost.pop().request is request

    def land(self, request: Request, node: Peer) -> None:
        attempt = request.attempt(self.remote._control.me.boot_id)
        self.remote.take(node, PrefillDone(attempt=attempt, num_tokens=request.kv_tokens))
        assert request.state is RequestState.LANDED

    def fail_so_often(self, times: int) -> None:
        for _ in range(times):
            request, node = self.ask()
            assert node == BROKEN
            self.fail(request, node)

    def trial(self) -> Request:
        """What the broken node gets when it has failed for long enough ago."""
        self.fail_so_often(FAILURES)
        self.clock.now += TRIAL_AFTER_S - 0.1
        assert self.ask()[1] == OTHER
        self.clock.now += 0.1
        trial, node = self.ask()
        assert node == BROKEN
        return trial


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(Clock(monkeypatch))


def test_a_node_that_failed_three_requests_in_a_row_is_passed_over(node: Node) -> None:
    node.fail_so_often(FAILURES)
    assert [node.ask()[1] for _ in range(3)] == [OTHER] * 3


def test_one_request_that_fails_again_and_again_says_little_of_the_node(node: Node) -> None:
    request, asked = node.ask()
    for _ in range(2 * FAILURES):
        node.fail(request, asked)
        request.failed_nodes.clear()
        assert request.state is RequestState.WAITING
        request, asked = node.ask(request)
        assert asked == BROKEN


def test_what_a_node_refuses_is_no_failure(node: Node) -> None:
    for _ in range(2 * FAILURES):
        request, asked = node.ask()
        assert asked == BROKEN
        node.fail(request, asked, refused=True)


def test_a_success_in_between_begins_the_count_anew(node: Node) -> None:
    node.fail_so_often(FAILURES - 1)
    node.land(*node.ask())
    node.fail_so_often(FAILURES - 1)
    assert node.ask()[1] == BROKEN


def test_after_ten_seconds_it_gets_one_request_as_a_trial(node: Node) -> None:
    trial = node.trial()
    assert [node.ask()[1] for _ in range(3)] == [OTHER] * 3, "the others wait for how the trial ends"
    node.land(trial, BROKEN)
    assert [node.ask()[1] for _ in range(3)] == [BROKEN] * 3


def test_after_a_trial_that_failed_it_waits_for_ten_seconds_more(node: Node) -> None:
    trial = node.trial()
    node.fail(trial, BROKEN)
    assert node.ask()[1] == OTHER
    node.clock.now += TRIAL_AFTER_S
    assert node.ask()[1] == BROKEN


def test_a_trial_that_is_given_up_is_not_waited_for(node: Node) -> None:
    trial = node.trial()
    node.remote.abandon(trial)
    assert node.ask()[1] == BROKEN
