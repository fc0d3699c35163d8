"""`python -m benchmarks.fetch` on short prompts."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fetch.__main__ import main
from benchmarks.fetch.link import ThrottledChannel, throttled
from benchmarks.fetch.measure import Case
from tests.prefill_node.sending import LateChannel
from transfer.planner import Descriptors
from transfer.writer import Outcome


def test_a_throttled_link_takes_its_time_for_all_bytes_together() -> None:
    here, there = np.zeros(40_000, dtype=np.uint8), np.ones(40_000, dtype=np.uint8)
    link = ThrottledChannel(LateChannel("tcp"), rate=400_000)
    started = time.monotonic()
    halves = [
        Descriptors(*(np.array([value]) for value in (there.ctypes.data + at, here.ctypes.data + at, 20_000)))
        for at in (0, 20_000)
    ]
    posted = [link.submit(half) for half in halves]
    assert [each.wait() for each in posted] == [Outcome.LANDED] * 2
    assert 0.1 <= time.monotonic() - started < 1
    assert here.all()
    channel = LateChannel("tcp")
    assert throttled(channel, 0) is channel


def test_the_choice_is_right_if_it_is_the_faster_way() -> None:
    def case(fetching: float | None, estimated_fetching: float) -> Case:
        return Case("tcp", 0, 1000, 2.0, fetching, None, None, 2.0, estimated_fetching)

    assert case(1.0, 1.9).is_right
    assert case(None, 2.1).is_right
    assert not case(1.0, 2.1).is_right
    assert not case(2.5, 1.9).is_right


@pytest.mark.slow
def test_it_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "fetch.json"
    main(lengths="256,512", layers=2, chunk=256, fetch_rate="1000000", json_path=path)
    written = json.loads(path.read_text())
    assert [(case["transport"], case["rate"]) for case in written["cases"]] == [
        ("shm", 0), ("shm", 0), ("tcp", 0), ("tcp", 0), ("tcp", 1e6), ("tcp", 1e6)
    ]  # fmt: skip
    assert [each["stop"] for each in written["passes"]] == [256, 512]
