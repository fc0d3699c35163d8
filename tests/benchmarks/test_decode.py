"""Which part of a decode step a kernel belongs to, what the hardware takes for it, and that the requests decode."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.decode.config import DecodeBench
from benchmarks.decode.curves import main as curves
from benchmarks.decode.curves import read_curves
from benchmarks.decode.timing import part_of
from benchmarks.decode.workload import GivenSelection, Requests, model_of
from benchmarks.stepping import GREEDY, launch, next_tokens
from engine.runner import ModelRunner
from model.config import network_config
from model.loader import choose_backend
from model.roofline import HBM_BYTES_PER_MS, RankModel, StepPart, Work, work_of_step
from model.sparse_model import SparseModel

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SOURCES = [path.read_text() for path in (*ROOT.glob("kernels/triton/*.py"), *ROOT.glob("csrc/*.cu"))]


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        (StepPart.INDEX, ("_score_pages", "score_pages", "_score_prompt", "_encode_index_queries")),
        (StepPart.SWAP_IN, ("swap_in",)),
        (StepPart.TOP_K, ("top_k",)),
        (StepPart.ATTENTION, ("_attend_split", "attend_items")),
        (StepPart.PROJECTIONS, ("_linear", "_add_up", "_partial_products", "_quantise")),
        (StepPart.EXPERTS, ("_swiglu_quantise", "_experts", "_weigh", "_sort", "_choose")),
    ],
)
def test_kernels_of_this_project_are_known_by_their_names(part: StepPart, kernels: tuple[str, ...]) -> None:
    """Renaming one would move its time to the rest."""
    for name in kernels:
        assert any(f" {name}(" in source for source in SOURCES), name
        assert part_of(name) is part


def small_sizes(model_type: str = "deepseek_v32", layers: int = 2, **others: object) -> PreTrainedConfig:
    """Of a model with one dense layer, whose other layers are mixtures of experts."""
    return AutoConfig.for_model(  # type: ignore[no-any-return]
        model_type,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        index_topk=32,
        index_n_heads=16,
        index_head_dim=32,
        **others,
    )


def test_runs_of_one_context_are_compared(tmp_path: Path) -> None:
    def written(name: str, context: int, drafts: int, **cases: dict[int, tuple[float, ...]]) -> Path:
        document = {
            "config": {"context": str(context), "speculative_num_steps": str(drafts)},
            "cases": [
                {"way": way, "batch": batch, "step_ms": ms} for way, of in cases.items() for batch, ms in of.items()
            ],
        }
        (tmp_path / name).write_text(json.dumps(document))
        return tmp_path / name

    files = [
        written("shorter", 32768, 0, ours={1: (9.0, 10.0, 12.0), 64: (70.0,)}, theirs={1: (10.0,)}),
        written("again", 32768, 0, ours={64: (80.0,)}),
        written("longer", 65536, 1, ours={1: (20.0,)}),
    ]
    assert read_curves(files) == {
        32768: {"ours": {1: 100.0, 64: 800.0}, "theirs": {1: 100.0}},
        65536: {"ours": {1: 100.0}},
    }
    curves(files, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size


GLM_LAYERS = 6
"""Of which the first three have an indexer, as GLM-5.2 shares them."""


def small(config: DecodeBench, model_type: str = "deepseek_v32") -> RankModel:
    glm: dict[str, object] = {"layers": GLM_LAYERS, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    sizes = small_sizes(model_type, **(glm if model_type == "glm_moe_dsa" else {}))  # type: ignore[arg-type]
    return model_of(network_config(sizes), config, CPU)


@pytest.mark.parametrize(
    ("model_type", "rank_of", "kv_cache_dtype"),
    [
        ("deepseek_v32", 1, "bfloat16"),
        ("deepseek_v32", 4, "fp8_e4m3"),
        ("glm_moe_dsa", 1, "bfloat16"),
        ("glm_moe_dsa", 4, "fp8_e4m3"),
    ],
)
def test_requests_decode_and_miss_what_they_must_select(model_type: str, rank_of: int, kv_cache_dtype: str) -> None:
    """Misses are counted once where layers share a selection, and each of the layers fetches items of its own."""
    config = DecodeBench(rank_of=rank_of, context=300, quantization="none", kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    model = small(config, model_type)
    spec = model.spec
    assert (spec.num_layers, spec.num_index_layers) == ((6, 3) if model_type == "glm_moe_dsa" else (2, 2))
    requests = Requests(spec, config.context, 2, 2 * spec.index_topk, CPU)
    given = GivenSelection(choose_backend("auto", CPU, spec), spec, requests)
    runner = ModelRunner(
        SparseModel(model.network, spec, given), requests.coordinator, 2, spec.context_length, record=False
    )
    for request_id in requests.ids:
        runner.admit(request_id, [1], [], GREEDY)

    for first, misses in ((0, 32), (8, 8)):
        given.positions.copy_(torch.arange(first, first + spec.index_topk))
        before = requests.coordinator.counters()
        requests.make_room()
        tokens = next_tokens(runner, launch(runner, requests.coordinator, requests.ids))
        assert all(0 <= token < spec.vocab_size for token in tokens)
        after = requests.coordinator.counters()
        assert after.misses - before.misses == misses * 2 * spec.num_index_layers
        assert after.bytes - before.bytes == misses * 2 * spec.num_layers * spec.kv_layout.item_bytes
    requests.close()


def test_work_is_what_has_to_be_read() -> None:
    config = DecodeBench(rank_of=4, quantization="none", kv_cache_dtype="fp8_e4m3")
    model = small(config)
    work = work_of_step(model, batch=2, context=1000, missed=5, requests_in_group=8)
    item_bytes, key_bytes = 32 + 4 + 32, 32 + 4
    assert work[StepPart.INDEX][0].num_bytes == 2 * 2 * 1000 * key_bytes
    assert work[StepPart.ATTENTION][0].num_bytes == 2 * 2 * 32 * item_bytes
    assert work[StepPart.SWAP_IN][0] == Work(link_bytes=2 * 2 * 5 * item_bytes)
    expert, router = 3 * 32 * 64 * 2, 8 * 64 * 2
    hit = 2 * (1 - (6 / 8) ** 8)  # of the two of eight experts that this process has, by eight tokens
    assert work[StepPart.EXPERTS][0].num_bytes == pytest.approx(expert * (hit + 1) + router)
    attention = (32 + 32 + 48) * 64 + 2 * 32 * 32 + 2 * 32 * 32 + 64 * 32 + 16 * 32 * 32
    assert work[StepPart.PROJECTIONS][0].num_bytes == 2 * (2 * attention + 3 * 64 * 64)
    assert work[StepPart.PROJECTIONS][1] == Work(64 * 64 * 2, 2 * 2 * 64 * 64)


def test_a_part_takes_the_larger_of_memory_and_arithmetic_then_the_link() -> None:
    assert Work(num_bytes=HBM_BYTES_PER_MS, operations=800e9 / 2).ms(50) == 1
    assert Work(num_bytes=HBM_BYTES_PER_MS, operations=800e9 * 3).ms(50) == 3
    assert Work(num_bytes=HBM_BYTES_PER_MS, operations=800e9 * 3, in_fp8=True).ms(50) == 1.5
    assert Work(num_bytes=HBM_BYTES_PER_MS, link_bytes=100e6).ms(50) == 3
