"""A session stays where its prefix is, and nodes stay about equally full."""

import pytest

from gateway.prefix_routing import ranked
from tests.gateway.session_simulation import SessionSimulation

NODES = ("one", "two", "three")


@pytest.mark.parametrize(
    ("cached", "load", "expected"),
    [
        ({}, (0, 0, 0), "one"),
        ({}, (9000, 5000, 6000), "two"),
        ({"three": 64}, (0, 0, 0), "three"),
        ({"one": 4096}, (14_000, 10_000, 10_000), "one"),
        ({"one": 4096}, (40_000, 10_000, 10_000), "two"),
        ({"one": 32_768}, (40_000, 10_000, 10_000), "one"),
        ({"one": 2048, "two": 4096}, (0, 0, 0), "two"),
        ({"one": 4096, "three": 4096}, (3000, 0, 2000), "three"),
    ],
    ids=[
        "all equal: the first",
        "nothing is cached: the emptiest",
        "one block is cached",
        "a little fuller",
        "much fuller",
        "much fuller, but the prefix is long",
        "the longer prefix",
        "equal prefixes, equal worth: the emptier one",
    ],
)
def test_the_choice(cached: dict[str, int], load: tuple[int, int, int], expected: str) -> None:
    assert ranked(NODES, cached, dict(zip(NODES, load, strict=True)))[0] == expected


def test_1000_sessions_on_three_nodes_find_what_is_cached_and_fill_nodes_evenly() -> None:
    outcome = SessionSimulation(nodes=3, blocks=4000, seed=0).run(1000)
    assert outcome.requests > 3000
    assert outcome.findable > 10_000_000
    assert outcome.found >= 0.95 * outcome.findable
    assert outcome.fullest <= 1.5 * outcome.mean
