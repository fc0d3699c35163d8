"""What a decode node computes as a rank of a group, with real KV tiers and a model that counts."""

from collections.abc import Callable

import pytest
import torch

from engine.draft_policy import StepSize
from ranks.barrier import GroupFailed, StepBarrier
from ranks.group import SingleRank
from tests.decode_node.world import World, counted


class OtherRanks(SingleRank):
    """A group whose other ranks want steps of `batch` requests at most, and of `width` tokens of each. It is its own
    step barrier."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.barrier: StepBarrier = self
        self.batch, self.width = 0, 1
        self.asked: list[int] = []

    def wait(self, wanted: int) -> int:
        self.asked.append(wanted)
        return max(wanted, StepSize(self.batch, self.width).packed)

    def spin_before_sleep(self, is_awaited: Callable[[], bool]) -> bool:
        return False

    def failure(self, error: Exception) -> GroupFailed:
        return GroupFailed(f"rank 0 failed: {error}")


@pytest.fixture
def ranks() -> OtherRanks:
    return OtherRanks()


@pytest.fixture
def harness(ranks: OtherRanks) -> World:
    return World(ranks=ranks)


def test_a_rank_without_requests_computes_what_the_others_have_as_padding(harness: World, ranks: OtherRanks) -> None:
    harness.turn()
    assert harness.model.batches == []
    ranks.batch = 3
    harness.turn()
    assert harness.model.batches == [3]
    assert set(ranks.asked) == {0}
    assert harness.coordinator.counters().violations == 0
    assert harness.coordinator.is_idle()
    assert not harness.scheduler.has_work, "the others call it"


def test_a_rank_with_fewer_requests_than_others_pads_and_says_the_same(harness: World, ranks: OtherRanks) -> None:
    for others in (0, 5, 8, 1):
        ranks.batch = others
        request_id = f"r{others}"
        harness.ask(request_id, tuple(range(10, 20)), 6)
        harness.ask(f"{request_id}-short", (7,), 3)
        harness.run()
        assert harness.answers[request_id] == counted((19,), 6)
        assert harness.answers[f"{request_id}-short"] == counted((7,), 3)
        assert min(harness.model.batches[-3:]) >= others
    assert harness.coordinator.counters().violations == 0


def test_a_forward_pass_that_fails_ends_the_group_and_not_one_batch(harness: World) -> None:
    harness.model.error = RuntimeError("out of memory")
    harness.ask("r", (1, 2, 3), 6)
    with pytest.raises(GroupFailed, match="rank 0 failed: out of memory"):
        harness.run()
    assert "r" not in harness.ended
    harness.scheduler.end_streams("rank 0 failed")
    (output,) = harness.control.outputs()
    assert (output.finish_reason, output.error) == ("lost", "rank 0 failed")


def test_padding_that_fails_ends_the_group(harness: World, ranks: OtherRanks) -> None:
    harness.model.error = RuntimeError("a collective failed")
    ranks.batch = 2
    with pytest.raises(GroupFailed, match="a collective failed"):
        harness.turn()


def test_ranks_that_draft_compute_steps_of_the_width_of_the_largest(ranks: OtherRanks) -> None:
    drafting = World(ranks=ranks, max_drafts=3)
    ranks.batch, ranks.width = 5, 2
    drafting.turn()
    assert drafting.model.batches == [10], "two tokens of each of five requests, all padding"
    drafting.ask("r", (1, 2, 3), 20)
    drafting.run()
    assert drafting.answers["r"] == counted((3,), 20)
    assert set(drafting.model.batches) == {10}
    assert drafting.coordinator.counters().violations == 0
