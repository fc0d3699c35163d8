"""For which sizes decode steps are recorded."""

from engine.graphs import batch_ladder, context_ladder


def test_ladders_end_at_the_largest() -> None:
    assert batch_ladder(1) == [1]
    assert batch_ladder(11) == [1, 2, 4, 8, 11]
    assert batch_ladder(32) == [1, 2, 4, 8, 16, 32]
    assert context_ladder(600) == [600]
    assert context_ladder(8192) == [2048, 8192]
    assert context_ladder(131072) == [2048, 8192, 32768, 131072]
