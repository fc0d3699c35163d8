"""An attempt to have a prompt prefilled: what is asked for, what lands, and a node that answers and does not get on."""

import numpy as np
import pytest

from control.messages import (
    ChunkDone,
    Holding,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Progress,
)
from control.prompt_logprobs import PromptLogprobs
from decode_node.request import Request, RequestState
from tests.decode_node.remote_world import (
    FIRST,
    NO_CHECKSUMS,
    PATIENCE_S,
    SECOND,
    Landed,
    Lost,
    R,
    RemoteWorld,
)
from tests.decode_node.world import GATEWAY


def test_slots_are_reserved_before_they_are_named(h: RemoteWorld) -> None:
    h.dispatch()
    assert h.table.is_writable(R)
    peer, message = h.control.repeated["prefill", R]
    assert peer == FIRST
    assert isinstance(message, PrefillRequest)
    assert (message.attempt, message.extents, message.hisparse) == (R, ((4, 3),), True)
    assert message.token_ids == (1, 2, 3), "all tokens but the last, which a decode step computes"
    assert message.destination == h.destination
    h.take(FIRST, PrefillAccepted(attempt=R))
    assert not h.control.repeated


def logprobs(start: int, stop: int) -> PromptLogprobs:
    rows = np.arange(start, stop)[:, None].repeat(3, axis=1)
    return PromptLogprobs.of(start, rows.astype(np.int32), -rows.astype(np.float32))


def test_log_probabilities_are_asked_for_until_the_prompt_lands(h: RemoteWorld) -> None:
    generate = h.request.generate.model_copy(update={"prompt_logprobs": 2})
    h.request = Request(generate, GATEWAY)
    h.dispatch()
    [(_, asked)] = h.control.repeated.values()
    assert isinstance(asked, PrefillRequest)
    assert (asked.prompt_logprobs, asked.last_token_id) == (2, 4)
    chunk = ChunkDone(attempt=R, number=0, checksums=NO_CHECKSUMS, prompt_logprobs=(logprobs(1, 3),))
    h.take(FIRST, chunk)
    assert len(h.take(FIRST, PrefillFailed(attempt=R, reason="out of memory"))) == 1
    assert h.request.prompt_logprobs is None

    h.dispatch(SECOND)
    second = R._replace(epoch=2)
    h.take(SECOND, ChunkDone(attempt=second, number=0, checksums=NO_CHECKSUMS, prompt_logprobs=(logprobs(1, 3),)))
    done = PrefillDone(attempt=second, num_tokens=3, chunks=1, prompt_logprobs=(logprobs(3, 4),))
    assert h.outcomes(lambda: h.remote.take(SECOND, done)) == [Landed(h.request)]
    assert h.request.prompt_logprobs is not None
    assert h.request.prompt_logprobs.floats.tolist() == [[-1.0] * 3, [-2.0] * 3, [-3.0] * 3]

    h.request.move(RequestState.WAITING)
    h.request.host_slots = None
    h.control.repeated.clear()
    h.dispatch()
    [asked_again] = [message for key, (_, message) in h.control.repeated.items() if key[0] == "prefill"]  # type: ignore[index]
    assert isinstance(asked_again, PrefillRequest)
    assert (asked_again.prompt_logprobs, asked_again.last_token_id) == (None, 4)


@pytest.mark.parametrize(
    ("wanted", "piece", "reason"),
    [
        (2, logprobs(1, 3), "missing"),
        (2, logprobs(1, 5), "of a prompt of 4 tokens"),
        (2, PromptLogprobs.of(1, np.zeros((3, 3), np.int32), np.full((3, 3), np.inf, np.float32)), "finite"),
        (None, logprobs(1, 4), "not asked for"),
    ],
)
def test_log_probabilities_that_cannot_be_cost_the_attempt(
    h: RemoteWorld, wanted: int | None, piece: PromptLogprobs, reason: str
) -> None:
    h.request = Request(h.request.generate.model_copy(update={"prompt_logprobs": wanted}), GATEWAY)
    h.dispatch()
    [lost] = h.take(FIRST, PrefillDone(attempt=R, num_tokens=3, prompt_logprobs=(piece,)))
    assert reason in lost.reason


def test_a_request_that_is_never_accepted_is_given_up(h: RemoteWorld) -> None:
    """Dropped as malformed, say. The node is asked for others as soon as it answers anything."""
    h.dispatch()
    assert h.wait(PATIENCE_S - 1) == []
    assert h.wait(2) == [Lost(h.request, "prefill node 127.0.0.1:2 has not accepted it for 60 s")]
    assert ("prefill", R) not in h.control.repeated
    h.request.failed_nodes.clear()
    assert h.remote.nodes.choose(h.request) == SECOND
    h.take(FIRST, Progress(current_pass=4))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_a_node_that_hangs_in_a_forward_pass_is_avoided_until_it_goes_on(h: RemoteWorld) -> None:
    """Its other threads answer pings and messages as ever."""
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {})
    h.dispatch()
    h.accepted()
    h.progress(current_pass=7)
    for _ in range(int(PATIENCE_S)):
        assert h.wait(1) == []
        h.progress(current_pass=7)
    assert h.wait(1) == [Lost(h.request, "prefill node 127.0.0.1:2 has made no progress for 60 s")]
    assert h.remote.quarantine.num_slots == 3
    h.request.failed_nodes.clear()
    assert h.remote.nodes.choose(h.request) == SECOND
    h.control.sent.clear()
    h.wait(1)
    assert (FIRST, Holding()) in h.control.sent, "it is asked, though nothing of this node is there"
    h.take(FIRST, Progress(current_pass=7))
    assert h.remote.nodes.choose(h.request) == SECOND
    h.take(FIRST, Progress(current_pass=None))
    assert h.remote.nodes.choose(h.request) == FIRST


def test_passes_of_a_node_count_as_progress_of_its_requests(h: RemoteWorld) -> None:
    h.dispatch()
    h.accepted()
    for computed, current_pass in ((0, 1), (0, 2), (2, 2), (3, None), (3, None), (3, None)):
        assert h.wait(PATIENCE_S - 1) == []
        h.progress(computed, current_pass)
    h.wait(PATIENCE_S + 1)
    assert h.request.state is RequestState.WAITING, "not even that it is being sent was heard any more"


def test_progress_that_another_node_claims_is_none(h: RemoteWorld) -> None:
    h.dispatch()
    h.accepted()
    for number in range(10):
        h.take(SECOND, Progress(computed=((R, 1),), current_pass=number))
        h.wait(PATIENCE_S / 9)
    assert h.request.state is RequestState.WAITING
