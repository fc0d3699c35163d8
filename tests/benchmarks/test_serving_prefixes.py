"""Traces and conversations: what is sent, and what is said of what was cached."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from base.errors import StartupError
from benchmarks.serving import processes
from benchmarks.serving.config import ServingBench
from benchmarks.serving.replay import Scale, TraceReplay, read_replay
from benchmarks.serving.services import local_services
from benchmarks.serving.workload import Prompt
from tests.benchmarks.conftest import CachingStub, bench, in_full, started

TRACE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 40, "hash_ids": [5, 6, 7]},
    {"timestamp": 1000, "input_length": 100_000, "output_length": 1, "hash_ids": [5, *range(10, 205)]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 80, "hash_ids": [5, 6, 8]},
    {"timestamp": 5000, "input_length": 700, "output_length": 1, "hash_ids": [9, 6]},
    {"timestamp": 6000, "input_length": 512, "output_length": 1, "hash_ids": [5]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
    return path


def replay(trace: Path, limit: int | None = None, **scale: int) -> TraceReplay:
    return read_replay(trace, limit, Scale(**scale), vocab_size=256, seed=0)


def ids(prompt: Prompt) -> list[int]:
    assert isinstance(prompt.content, list)
    return prompt.content


def test_equal_hash_ids_are_equal_tokens_whatever_the_size_of_a_block(trace: Path) -> None:
    for block_tokens in (512, 64):
        scaled = replay(trace, block_tokens=block_tokens, max_input=200 * block_tokens)
        first, long, second, third, fourth = (ids(prompt) for prompt in scaled.draw(0, 5))
        assert [len(first), len(second), len(third), len(fourth)] == [
            -(-length * block_tokens // 512) for length in (1100, 1536, 700, 512)
        ]
        assert first[: 2 * block_tokens] == second[: 2 * block_tokens]
        assert first[2 * block_tokens :] != second[2 * block_tokens : len(first)]
        assert first[block_tokens : 2 * block_tokens][: len(third) - block_tokens] == third[block_tokens:]
        assert third[:block_tokens] != first[:block_tokens] == fourth == long[:block_tokens]


def test_what_does_not_fit_is_left_out_and_answers_end_early(trace: Path) -> None:
    scaled = replay(trace, limit=3, max_input=2000, max_output=50)
    assert scaled.left_out == 1
    assert [prompt.output_tokens for prompt in scaled.draw(0, 3)] == [40, 50, 1]
    assert scaled.longest == 1536 + 50
    assert [prompt.output_tokens for prompt in replay(trace, block_tokens=64).draw(0, 3)] == [5, 1, 10]
    assert len(replay(trace, context=1536 + 80).traced) == 4
    assert len(replay(trace, context=1536 + 79).traced) == 3
    with pytest.raises(StartupError, match="no request fits; the shortest prompt has 64 tokens"):
        replay(trace, block_tokens=64, max_input=63)


def test_a_trace_keeps_its_times(trace: Path) -> None:
    assert replay(trace, max_input=2000).schedule(speed=2.0).times == (0.0, 1.0, 2.0, 2.5)
    assert replay(trace, limit=2).schedule(float("inf")).times == (0.0, 0.0)


def test_a_replayed_trace_is_reported_beside_the_ideal(
    stub: Callable[..., str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caching = CachingStub()
    urls = ["--base-url", f"on={stub(caching.answer)}", "--base-url", f"silent={stub(in_full)}"]
    words = ["--trace", str(trace), "--speed", "100", "--max-input", "2000", "--warmup-requests", "2"]
    content = bench(tmp_path, *urls, *words)
    on, silent = content["points"]
    sent = 1100 + 1536 + 700 + 512
    assert on["prefix_hits"] == {"told": sent, "cached": 1536, "unknown": 0, "sent": sent, "ideal": 1536}
    assert silent["prefix_hits"] == {"told": 0, "cached": 0, "unknown": 4, "sent": sent, "ideal": 1536}
    assert silent["remarks"] == ["4 of 4 answers do not say how much of their prompt was cached"]
    assert [len(request["prompt"]) for request in caching.asked] == [512, 512, 1100, 1536, 700, 512]
    assert on["load"] == {"kind": "scheduled", "value": "trace x100"}
    assert content["options"]["left_out"] == 1
    assert [request["max_tokens"] for request in caching.asked[2:]] == [40, 80, 1, 1]
    assert "39.9" in capsys.readouterr().out.split("prefixes")[1]


def test_each_turn_of_a_conversation_sends_all_that_was_said_before(stub: Callable[..., str], tmp_path: Path) -> None:
    caching = CachingStub()
    words = ["--turns", "3", "--shared-prefix", "64", "--input-tokens", "30", "--output-tokens", "40"]
    load = ["--concurrency", "1,2", "--num-requests", "2", "--warmup-requests", "1"]
    alone, both = bench(tmp_path, "--base-url", stub(caching.answer), *words, *load)["points"]
    prompts = [request["prompt"] for request in caching.asked]
    assert [len(prompt) for prompt in prompts[:7]] == [94, 94, 164, 234, 94, 164, 234]
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 1
    assert len({tuple(prompt[64:94]) for prompt in prompts}) == 2 * (1 + 2)
    assert prompts[2][:134] == prompts[1] + caching.answers[1]
    assert prompts[3][:204] == prompts[2] + caching.answers[2]
    assert all(request["return_token_ids"] for request in caching.asked)
    # The first turn finds the system prompt, the next ones whole blocks of what was said before.
    hits = 2 * (64 + 128 + 192)
    assert alone["prefix_hits"] == {"told": 984, "cached": hits, "unknown": 0, "sent": 984, "ideal": hits}
    assert both["answered"] == 6
    assert both["prefix_hits"]["cached"] == both["prefix_hits"]["ideal"] == hits


def test_a_conversation_needs_to_know_what_was_answered(stub: Callable[..., str], tmp_path: Path) -> None:
    words = ["--turns", "2", "--concurrency", "1", "--num-requests", "2"]
    (point,) = bench(tmp_path, "--base-url", stub(in_full), *words, code=1)["points"]
    assert point["failed"] == {"no token ids": 2}


def test_variants_are_services_of_their_own() -> None:
    config = ServingBench(
        variants=("on=", "--no-x"), serve_flags=("--device", "cuda"), compare_hisparse_config=("{}",), extra_body="{}"
    )
    labels = [service.label for service in local_services(Path("/m"), config)]
    assert labels == ["default, on", "default, --no-x", "{}, on", "{}, --no-x"]
    for words, label, flags in (
        ("off=--no-x --y 1", "off", ("--no-x", "--y", "1")),
        ("--dtype=float32", "--dtype=float32", ("--dtype=float32",)),
        ('fp32, all=--hisparse-config {"a":1}', "fp32, all", ("--hisparse-config", '{"a":1}')),
    ):
        (one,) = local_services(Path("/m"), ServingBench(variants=(words,), serve_flags=("--y", "2")))
        assert (one.label, one.flags) == (label, ("--y", "2", *flags))  # type: ignore[attr-defined]


def test_nodes_are_found_by_their_command_lines() -> None:
    waits = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    with (
        started([*waits, "prefill", "--port", "23456"], stdout=subprocess.PIPE) as node,
        started([*waits, "gateway", "--port", "23457"], stdout=subprocess.PIPE) as gateway,
    ):
        for process in (node, gateway):
            assert process.stdout is not None
            process.stdout.readline()
        assert processes.node_urls(os.getpid()) == ["http://127.0.0.1:23456"]
        before = processes.processor_seconds(os.getpid())
        assert sum(range(1_000_000)) > 0
        assert processes.processor_seconds(os.getpid()) > before
