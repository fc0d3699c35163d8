"""What a prefix cache brings and costs, measured with services that compute nothing."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.prefix_cost import subject
from benchmarks.prefix_cost.measure import CostPlan, measure
from benchmarks.prefix_cost.report import print_costs, write_json
from benchmarks.serving.client import Endpoint
from benchmarks.serving.stub import MODEL, Reply
from tests.benchmarks.caching import CachingStub
from tests.benchmarks.conftest import Json, in_full


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
    monkeypatch.setattr(subject, "_SETTLE_S", 0.0)


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
