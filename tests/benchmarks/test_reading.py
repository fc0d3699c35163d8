"""The benchmark of reading reads what it says."""

import pytest

from benchmarks.reading import Shape, measured


@pytest.mark.slow
def test_every_case_is_read_and_written() -> None:
    rates = list(measured(Shape(tokens=200, layers=2, item_bytes=40), rounds=1))
    assert [(each.protocol, each.run) for each in rates] == [
        (protocol, run) for protocol in ("tcp", "shm") for run in (200, 64, 1)
    ]
    assert all(each.read > 0 and each.written > 0 for each in rates)
