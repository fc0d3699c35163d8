"""Programs of `benchmarks` run on small cases, and times belong to what was timed."""

import json
import statistics
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch

from benchmarks import loading
from benchmarks.decode.config import DecodeBench
from benchmarks.fetch.__main__ import main as measure_fetches
from benchmarks.grammar.steps import GrammarSteps
from benchmarks.kernel_times import exclusive_times
from benchmarks.loading import main as measure_loading
from benchmarks.ranks.agreement import time_agreement
from benchmarks.ranks.prompts import time_prompt_of
from benchmarks.ranks.steps import time_steps_of
from benchmarks.reading import Shape, measured
from control.grammar import TextChoice
from model.families import published_config
from ranks.place import RankPlace
from tests.benchmarks.test_decode import small
from tests.engine.grammar.small import PADDED, compiled, encode
from tests.ranks.ranks_harness import forked, join


@pytest.mark.slow
def test_it_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "fetch.json"
    measure_fetches(lengths="256,512", layers=2, chunk=256, fetch_rate="1000000", json_path=path)
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


def narrow_config() -> dict[str, object]:
    config = published_config("deepseek-v3.2", 4, 8)
    narrow = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 320}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "index_n_heads": 16}
    return config | narrow | attention


def test_what_is_written_is_loaded_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(loading, "_RANDOM_BYTES", 1 << 16)
    monkeypatch.setattr(loading, "published_config", lambda *_: narrow_config())
    directory = tmp_path / "checkpoint"
    with structlog.testing.capture_logs() as logs:
        measure_loading(directory, layers=4, routed_experts=8, device="cpu")
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["model.layers.3.mlp.experts.7.down_proj.weight_scale_inv"] in {f.name for f in files}
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    out = capsys.readouterr().out
    assert out.count("loading, cached") == 2
    assert out.count("dd, not cached") == 2
    assert "loading, not cached" in out


def test_ranks_time_what_they_do_together(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        woken = threading.Event()
        group = join(place, wake=woken.set)
        exchange = group.connect()
        agreed = time_agreement(group, woken)
        for times in (agreed.shared_memory, agreed.gloo, agreed.waking):
            assert min(times) > 0
        print("median us:", *(statistics.median(times) for times in (agreed.shared_memory, agreed.waking)))
        config = DecodeBench(rank_of=2, context=40, quantization="none", kv_cache_dtype="bfloat16")
        step = time_steps_of(group, exchange, small(config), config.context, 2)
        assert (step.batch, step.mixtures) == (2, 1)
        assert min(step.group_ms, step.alone_ms) > step.limit_ms > 0
        assert group.share(step.group_ms) == [step.group_ms] * 2
        config = DecodeBench(rank_of=2, context=80, quantization="none", kv_cache_dtype="bfloat16")
        whole, part = small(replace(config, rank_of=1)), small(config)
        took = time_prompt_of(group, exchange, whole, part, tokens=80, chunk=33)
        assert took.chunk == 33
        assert min(took.group_s, took.alone_s, took.ratio) > 0
        while not group.done():
            pass
        group.close()

    with forked(2, tmp_path, body) as ranks:
        assert [ranks.wait(rank, 60) for rank in range(2)] == [0, 0], ranks.said(0) + ranks.said(1)


@pytest.mark.slow
def test_the_host_alone_is_measured_without_a_device(tmp_path: Path) -> None:
    flags = ["--host-only", "--device", "cpu", "--tokens", "20", "--batch", "1", "--batch", "3"]
    command = [sys.executable, "-m", "benchmarks.overlap", *flags, "--json", str(tmp_path / "out.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        assert 0 < record["host_ms"] < record["step_ms"]
        assert record["kernels"] == 0


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    ran = [(10.0, 14.0, "second"), (0.0, 12.0, "first"), (11.0, 11.5, "hidden"), (20.0, 21.0, "later")]
    assert exclusive_times(ran) == [("first", 0.012), ("second", 0.002), ("hidden", 0.0), ("later", 0.001)]


def test_copies_ahead_count_while_nothing_is_computed() -> None:
    copies = [(0.0, 9.0, "copy_items"), (9.5, 11.0, "copy_items")]
    times = exclusive_times([*copies, (1.0, 5.0, "product"), (6.0, 8.0, "norm"), (10.5, 12.5, "sum")])
    assert times == [("copy_items", 0.003), ("product", 0.004), ("norm", 0.002), ("copy_items", 0.001), ("sum", 0.002)]


def test_answers_that_end_begin_again() -> None:
    grammar = compiled(TextChoice(options=("yes", "no")))
    steps = GrammarSteps(3, PADDED, layers=1, hidden_size=16, device=torch.device("cpu"), threads=1)
    pairs = steps.compare(grammar, encode("yes"), steps=5)
    steps.close()
    assert len(pairs.free) == len(pairs.bound) == 3
    assert all(step.ms > 0 for step in (*pairs.free, *pairs.bound))
