"""What the benchmark of ranks times, on CPUs and a small model."""

import statistics
import threading
from dataclasses import replace
from pathlib import Path

from benchmarks.decode.config import DecodeBench
from benchmarks.ranks.agreement import time_agreement
from benchmarks.ranks.prompts import time_prompt_of
from benchmarks.ranks.steps import time_steps_of
from ranks.place import RankPlace
from tests.benchmarks.test_decode import small
from tests.ranks.ranks_harness import forked, join


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
