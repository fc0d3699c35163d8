"""What fetching a prefix and computing it are estimated to cost."""

import random

import pytest

from prefill_node.costs import ComputeCost, FetchCosts


def test_another_decode_node_has_estimates_of_its_own() -> None:
    costs = FetchCosts()
    for _ in range(10):
        costs.observe("slow", "tcp", 10**8, 30.0)
    assert costs.estimate("slow", "tcp", 10**8) > 10
    assert costs.estimate("other", "tcp", 10**8) < 1
    assert costs.estimate("third", "shm", 10**8) < costs.estimate("other", "tcp", 10**8)


def test_estimates_find_what_a_pass_a_token_and_a_position_cost() -> None:
    cost = ComputeCost(chunk_size=512)
    assert cost.saved(0, 1024, 2048) is None, "nothing was computed yet"

    def seconds(start: int, stop: int) -> float:
        return 0.01 + (stop - start) * (1e-5 + 2e-9 * (start + stop) / 2)

    rng = random.Random(3)
    for _ in range(60):
        start = rng.randrange(0, 60000)
        stop = start + rng.choice([64, 512, 300])
        cost.observe([(start, stop)], seconds(start, stop) * rng.uniform(0.95, 1.05))
    expected = sum(seconds(start, start + 512) for start in range(0, 32768, 512))
    found = cost.saved(0, 32768, 32868)
    assert found is not None
    assert found == pytest.approx(expected, rel=0.1)


def test_estimates_of_one_kind_of_pass_explain_it_by_its_tokens() -> None:
    cost = ComputeCost(chunk_size=512)
    for _ in range(5):
        cost.observe([(0, 512)], 1.0)
    found = cost.saved(0, 5120, 5200)
    assert found is not None
    assert 8 < found < 20
