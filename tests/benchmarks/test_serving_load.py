"""Requests are sent when the load says so, and prompts are what the flags say."""

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from base.errors import StartupError
from benchmarks.serving.load import Closed, Load, Open, arrivals
from benchmarks.serving.workload import Prompt, RandomPrompts, read_prompts


class Gate:
    """Holds every request until as many are under way as are expected at once."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.under_way: list[int] = []
        self.most = 0
        self.opened = asyncio.Event()

    async def send(self, request: int) -> int:
        self.under_way.append(request)
        self.most = max(self.most, len(self.under_way))
        if len(self.under_way) == self.expected:
            self.opened.set()
        await self.opened.wait()
        self.under_way.remove(request)
        return request


@pytest.mark.parametrize(("load", "together"), [(Closed(3), 3), (Open(math.inf), 10)])
def test_a_load_has_so_many_requests_under_way(load: Load, together: int) -> None:
    async def drive() -> None:
        gate = Gate(together)
        assert sorted(await load.drive(range(10), gate.send)) == list(range(10))
        assert gate.most == together

    asyncio.run(asyncio.wait_for(drive(), 30))


def test_arrivals_are_a_poisson_process_that_a_seed_repeats() -> None:
    times = arrivals(4.0, 20001, seed=1)
    pauses = [after - before for before, after in pairwise(times)]
    mean = sum(pauses) / len(pauses)
    deviation = math.sqrt(sum((pause - mean) ** 2 for pause in pauses) / len(pauses))
    assert times[0] == 0.0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert arrivals(4.0, 20001, seed=1) == times != arrivals(4.0, 20001, seed=2)
    assert arrivals(math.inf, 3, seed=1) == [0.0, 0.0, 0.0]
    assert arrivals(1.0, 0, seed=1) == []


def test_prompts_have_the_lengths_asked_for_and_a_seed_repeats_them() -> None:
    workload = RandomPrompts(input_tokens=100, output_tokens=10, range_ratio=0.2, vocab_size=7)
    prompts = list(workload.draw(0, 500))
    lengths = {prompt.input_tokens for prompt in prompts}
    assert (min(filter(None, lengths)), max(filter(None, lengths))) == (80, 120)
    assert {prompt.output_tokens for prompt in prompts} == set(range(8, 13))
    assert {token for prompt in prompts for token in prompt.content} == set(range(7))
    assert list(workload.draw(0, 500)) == prompts
    assert not {str(prompt.content) for prompt in workload.draw(1, 500)} & {str(prompt.content) for prompt in prompts}
    assert workload.longest == 132


def test_prompts_of_a_file_are_taken_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + json.dumps({"prompt": [1, 2], "output_tokens": 3, "more": 0}) + "\n")
    first, second = Prompt("a", 8), Prompt([1, 2], 3)
    assert list(read_prompts(path, 8).draw(0, 3)) == [first, second, first]
    assert first.input_tokens is None


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": [1, "2"]}', '{"prompt": "a", "output_tokens": 0}']
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(StartupError, match="line 2: expected"):
        read_prompts(path, 8)
