"""The simulation of the prefix cache on traces, and what a cache brings and costs, by services that compute nothing."""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.prefix import timing
from benchmarks.prefix.__main__ import main, simulate
from benchmarks.prefix.trace import TracedPrompt
from benchmarks.prefix_cost import figures
from benchmarks.prefix_cost.measure import CostPlan, measure
from benchmarks.prefix_cost.report import print_costs, write_json
from benchmarks.serving.client import Endpoint
from benchmarks.serving.stub import MODEL, Reply
from tests.benchmarks.conftest import CachingStub, Json, in_full


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


@dataclass(frozen=True)
class Stubbed:
    """A service that runs. Its processes are those of this test."""

    label: str
    base_url: str

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        yield Endpoint(self.label, self.base_url, MODEL, process_id=os.getpid())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_SETTLE_S", 0.0)


def test_both_services_are_asked_the_same_and_what_was_cached_is_reported(
    stub: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caching, asked = CachingStub(), []

    async def silent(request: Json, reply: Reply) -> None:
        asked.append(request)
        await in_full(request, reply)

    on, off = Stubbed("on", stub(caching.answer)), Stubbed("off", stub(silent))
    plan = CostPlan(prompt_tokens=1000, shared_tokens=950, rounds=2, pair_tokens=50, pairs=3)
    report = measure(on, off, plan, vocab_size=256, timeout=30.0)
    prompts = [request["prompt"] for request in asked]
    assert prompts == [request["prompt"] for request in caching.asked]
    assert len(prompts) == 1 + 3 + 2 * 2
    new, again = prompts[4:6]
    assert new[:950] == again[:950]
    assert new[950:] != again[950:]
    with_cache, without = report.first_tokens
    assert (with_cache.cached_tokens, without.cached_tokens) == ([14 * 64] * 2, [None] * 2)
    assert report.processor is not None
    assert len(report.processor.ratios) == len(report.processor.first) == 3
    assert max(report.processor.tokens) <= 50
    print_costs(report, Console(width=80))
    assert "896" in capsys.readouterr().out.split()
    write_json(tmp_path / "out.json", report)
    assert json.loads((tmp_path / "out.json").read_text())["processor"]["labels"] == ["on", "off"]
