"""What is over is remembered, the latest longest."""

from base.tombstones import Tombstones


def test_the_oldest_are_forgotten_first() -> None:
    stones: Tombstones[str] = Tombstones(limit=2)
    for key in "abab":
        stones.add(key)
    stones.add("c")
    assert "a" not in stones
    assert "b" in stones
    assert "c" in stones
