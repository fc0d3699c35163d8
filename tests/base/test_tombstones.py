"""What is over is remembered, the latest longest."""

from base.tombstones import LatestDict


def test_the_oldest_are_forgotten_first() -> None:
    latest: LatestDict[str, None] = LatestDict(limit=2)
    for key in "ababc":
        latest[key] = None
    assert list(latest) == ["b", "c"]
