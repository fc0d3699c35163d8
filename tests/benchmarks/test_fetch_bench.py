"""`python -m benchmarks.fetch` on short prompts."""

import json
from pathlib import Path

import pytest

from benchmarks.fetch.__main__ import main
from benchmarks.reading import Shape, measured


@pytest.mark.slow
def test_it_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "fetch.json"
    main(lengths="256,512", layers=2, chunk=256, fetch_rate="1000000", json_path=path)
    written = json.loads(path.read_text())
    assert [(case["transport"], case["rate"]) for case in written["cases"]] == [
        ("shm", 0), ("shm", 0), ("tcp", 0), ("tcp", 0), ("tcp", 1e6), ("tcp", 1e6)
    ]  # fmt: skip
    assert [each["stop"] for each in written["passes"]] == [256, 512]


@pytest.mark.slow
def test_every_case_of_reading_is_read_and_written() -> None:
    rates = list(measured(Shape(tokens=200, layers=2, item_bytes=40), rounds=1))
    assert [(each.protocol, each.run) for each in rates] == [(p, run) for p in ("tcp", "shm") for run in (200, 64, 1)]
    assert all(each.read > 0 and each.written > 0 for each in rates)
