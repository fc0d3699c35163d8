"""The simulation of the prefix cache on traces."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prefix import timing
from benchmarks.prefix.__main__ import main, simulate
from benchmarks.prefix.trace import TracedPrompt


def prompt(length: int, *ids: int) -> TracedPrompt:
    return TracedPrompt(length, np.array(ids, dtype=np.int64))


def sessions(count: int, seed: int = 0) -> list[TracedPrompt]:
    """Conversations that grow with each turn, in random order, behind one of two beginnings."""
    generator, prompts, next_id = random.Random(seed), [], 2
    histories: list[list[int]] = []
    for _ in range(count):
        if histories and generator.random() < 0.6:
            history = histories.pop(generator.randrange(len(histories)))
        else:
            history = [generator.randrange(2)]
        grown = generator.randrange(1, 6)
        history = [*history, *range(next_id, next_id + grown)]
        next_id += grown
        histories.append(history)
        # A turn of its own is not a whole block: its id is never seen again.
        prompts.append(prompt(512 * len(history) + generator.randrange(1, 512), *history, next_id))
        next_id += 1
    return prompts


def test_the_cache_finds_what_the_ideal_finds_and_never_less_than_lru() -> None:
    prompts = sessions(400)
    report = simulate("sessions", prompts, ["unlimited", "50%", "20%", "10%", "5%", "4K"])
    unlimited, *limited = report.pools
    assert unlimited.hits == report.ideal > 0.3 * report.tokens
    assert report.problems() == []
    assert [pool.hits for pool in limited] == [pool.lru_from_the_end for pool in limited], "exact LRU"
    assert limited[0].hits > limited[3].hits
    worse = replace(report, pools=[replace(unlimited, hits=0), *limited])
    assert len(worse.problems()) == 2


def test_the_command_writes_tables_json_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "_REPEATS", 2)
    trace = tmp_path / "trace.jsonl"
    requests = ({"input_length": p.input_length, "hash_ids": p.hash_ids.tolist()} for p in sessions(50))
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    main(trace, "unlimited,10%", tmp_path / "out.json", tmp_path / "out.png")
    document = json.loads((tmp_path / "out.json").read_text())
    assert [pool["is_unlimited"] for pool in document["trace"]["pools"]] == [True, False]
    assert len(document["operations"]) == 5
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "never worse than LRU over blocks" in capsys.readouterr().out
