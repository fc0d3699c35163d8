"""Which part of a decode step a kernel belongs to, that the parts add up, and that the requests decode."""

from pathlib import Path

import pytest
import torch

from benchmarks.decode_step.timing import PARTS, REST, StepTiming, part_of
from benchmarks.decode_step.workload import GivenSelection, Requests, Shape, build_network, model_spec
from benchmarks.stepping import GREEDY, launch, next_tokens
from engine.runner import ModelRunner
from model.backends.choice import choose_backend
from model.sparse_model import SparseModel

ROOT = Path(__file__).resolve().parents[2]
OURS = {
    "index": ("_score_pages", "model/backends/triton_index.py"),
    "swap-in": ("swap_in", "csrc/swap_in.cu"),
    "attention": ("_attend_split", "model/backends/triton_attend.py"),
}


@pytest.mark.parametrize("part", OURS)
def test_a_kernel_of_this_project_is_known_by_its_name(part: str) -> None:
    """Renaming one would move its time to the rest."""
    name, source = OURS[part]
    assert f" {name}(" in (ROOT / source).read_text()
    assert part_of(name) == part


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void at::native::mbtopk::computeBlockDigitCounts<float, unsigned int, unsigned int, 1>", "top-k"),
        ("void at_cuda_detail::cub::detail::scan_by_key::DeviceScanByKeyKernel<", "top-k"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", REST),
        ("copy_items", REST),
    ],
)
def test_other_kernels(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_the_parts_are_the_whole_step() -> None:
    kernels = {"_score_pages": 1.0, "swap_in": 2.0, "_attend_split": 0.5, "_combine": 0.25, "gemm": 3.0}
    timing = StepTiming(median_ms=10.0, p90_ms=11.0, hit_rate=1.0, misses=0.0, num_bytes=0.0, kernels=kernels)
    assert timing.parts == {"index": 1.0, "top-k": 0.0, "swap-in": 2.0, "attention": 0.75, REST: 6.25}
    assert set(timing.parts) == {*PARTS, REST}


def test_requests_decode_and_miss_what_they_are_made_to_select() -> None:
    """On the CPU, and a small model; otherwise as it is timed."""
    shape = Shape(
        layers=2,
        hidden=64,
        heads=2,
        q_rank=32,
        latent_dim=32,
        rope_dim=16,
        nope_dim=16,
        value_dim=16,
        index_heads=16,
        index_dim=32,
        top_k=32,
        intermediate=64,
        vocab=64,
        context=300,
        max_steps=8,
    )
    cpu, spec = torch.device("cpu"), model_spec(shape)
    requests = Requests(shape, 2, 2 * shape.top_k, cpu)
    given = GivenSelection(choose_backend("auto", cpu, spec), 2, shape.top_k, cpu)
    model = SparseModel(build_network(shape, cpu), spec, given)
    runner = ModelRunner(model, requests.coordinator, len(requests.ids), shape.context_length, record=False)
    for request_id in requests.ids:
        runner.admit(request_id, 1, GREEDY)

    for first, misses in ((0, 32), (8, 8)):
        given.positions.copy_(torch.arange(first, first + shape.top_k))
        before = requests.coordinator.counters()
        requests.make_room()
        tokens = next_tokens(runner, launch(runner, requests.coordinator, requests.ids))
        assert all(0 <= token < shape.vocab for token in tokens)
        assert requests.coordinator.counters().misses - before.misses == misses * 2 * shape.layers
    requests.close()
