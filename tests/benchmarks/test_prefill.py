"""Which part of a chunk a kernel belongs to, what the hardware takes for it, and that the chunk is computed."""

import dataclasses

import pytest
import torch

from benchmarks.decode.workload import build_model, model_of
from benchmarks.prefill.config import PrefillBench
from benchmarks.prefill.timing import PARTS, ChunkTiming, KernelTime, by_part
from benchmarks.prefill.workload import MarkedExchange, Prompt
from model.config import network_config
from model.roofline import RankModel, StepPart, work_of_chunk
from tests.benchmarks.test_decode import small_sizes

CPU = torch.device("cpu")


def small(config: PrefillBench) -> RankModel:
    return model_of(network_config(small_sizes()), config, CPU)


def test_what_lies_between_marks_belongs_to_the_experts() -> None:
    kernels = [
        ("_quantise", 1.0),
        ("spin_kernel(long)", 0.1),
        ("nvjet_router", 2.0),
        ("_quantise", 3.0),
        ("_experts", 4.0),
        ("spin_kernel(long)", 0.1),
        ("_quantise", 1.0),
        ("_score_prompt", 7.0),
        ("copy", 1.0),
    ]
    assert set(by_part(kernels)) == {
        KernelTime("_score_prompt", StepPart.INDEX, 7.0, 1),
        KernelTime("_experts", StepPart.EXPERTS, 4.0, 1),
        KernelTime("_quantise", StepPart.EXPERTS, 3.0, 1),
        KernelTime("nvjet_router", StepPart.EXPERTS, 2.0, 1),
        KernelTime("_quantise", StepPart.PROJECTIONS, 2.0, 2),
        KernelTime("copy", StepPart.REST, 1.0, 1),
    }
    parts = ChunkTiming((30.0, 20.0, 40.0), 0, by_part(kernels)).parts
    assert parts == dict.fromkeys(PARTS, 0.0) | {
        StepPart.EXPERTS: 9.0,
        StepPart.INDEX: 7.0,
        StepPart.PROJECTIONS: 2.0,
        StepPart.REST: 12.0,
    }


@pytest.mark.parametrize("rank_of", [1, 4])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_a_chunk_is_computed_behind_what_is_in_the_pool(rank_of: int, kv_cache_dtype: str) -> None:
    """On the CPU, and a small model; otherwise as it is timed."""
    config = PrefillBench(rank_of=rank_of, contexts=("300",), chunked_prefill_size=70, quantization="none")
    config = dataclasses.replace(config, kv_cache_dtype=kv_cache_dtype)
    prompt = Prompt(small(config), 300, 70, CPU)
    before = prompt.pool.kv.clone(), prompt.pool.index_keys.clone()
    prompt.compute()
    for pool, old in zip((prompt.pool.kv, prompt.pool.index_keys), before, strict=True):
        assert torch.equal(pool[:, :230], old[:, :230])
        assert (pool[:, 230:300] != old[:, 230:300]).any(-1).all()
    again = prompt.pool.kv.clone()
    prompt.compute()
    assert torch.equal(prompt.pool.kv, again)


def test_work_of_published_experts() -> None:
    config = PrefillBench(layers=5, rank_of=8)
    device = torch.device("meta")
    model = build_model(config, device, lambda exchange: MarkedExchange(exchange, device))
    work = work_of_chunk(model, context=8192, chunk=8192, rank_of=8)
    (experts, _), (_, maps) = work[StepPart.EXPERTS], work[StepPart.PROJECTIONS]
    one = 3 * 7168 * 2048
    assert experts.operations == 2 * one * (65536 + 8192)  # of one mixture: one of a token's experts is here
    assert experts.in_fp8
    absorbed = sum(
        layer.attention.key_map.numel() + layer.attention.value_map.numel() for layer in model.network.layers[:-1]
    )
    assert maps.operations == 2 * 8192 * (absorbed + 7168 * 256), "a rank routes its own tokens"
