"""The top-k kernel on a GPU against a stable sort on the CPU."""

import pytest
import torch

from tests.gpu.test_attention_backends import CUDA, captured, generator, randn
from tests.kernels.sorted_top import sorted_top

pytest.importorskip("cuda.bindings")

from kernels.top_k import Geometry, on_device, top_positions

NAN = float("nan")


def some_scores(kind: str, rows: int, width: int) -> torch.Tensor:
    scores = randn(rows, width)
    if kind == "ties":  # as an indexer's: many exact zeros
        return scores.sub_(1).relu_().mul_(8).round_()
    if kind == "close":  # the first two digits of all are the same
        return scores.mul_(1e-4).add_(100)
    if kind == "odd":
        odd = torch.tensor([NAN, -NAN, float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-45], device=CUDA)
        return odd[torch.randint(0, len(odd), (rows, width), device=CUDA, generator=generator(2))]
    return scores


@pytest.mark.parametrize(
    ("rows", "width", "k"),
    [
        (1, 1, 5),
        (3, 100, 64),
        (2, 2048, 2048),
        (1, 131072, 2048),
        (16, 65536, 2048),
        (64, 32512, 2048),
        (1, 1_000_000, 8192),
        (100, 131072, 2048),
        (700, 5000, 512),
        (300, 33001, 2048),
        (140, 300_000, 20_000),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "ties", "close", "odd"])
@pytest.mark.parametrize("length_type", [None, torch.int32, torch.int64])
def test_the_largest_are_found_and_of_equal_ones_the_first(
    rows: int, width: int, k: int, kind: str, length_type: torch.dtype | None
) -> None:
    scores = some_scores(kind, rows, width)
    lengths = None
    if length_type is not None:
        lengths = torch.randint(-1, width + 2, (rows,), device=CUDA, generator=generator(1), dtype=length_type)
    selected = top_positions(scores, k, lengths)
    if rows > 20:  # sorting all of them takes too long
        part = torch.arange(0, rows, rows // 10, device=CUDA)
        scores, selected = scores[part], selected[part]
        lengths = None if lengths is None else lengths[part]
    assert torch.equal(selected, sorted_top(scores, k, lengths))


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kept", [1024, 4096, 16384])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_every_geometry_gives_the_same(cluster: int, kept: int, kind: str) -> None:
    kernels = on_device(CUDA)
    scores = some_scores(kind, 3, 50_000)
    expected = sorted_top(scores, 2048)
    for kernel in kernels.specializations:
        if cluster <= kernel.max_cluster and kernels.running.get(cluster):
            positions = torch.full((3, 2048), -9, device=CUDA)
            kernels.launch(scores, None, positions, Geometry(kernel, cluster, kept))
            assert torch.equal(positions, expected)


def test_rows_may_be_apart_and_what_lies_behind_them_does_not_count() -> None:
    memory = torch.full((9, 70_000), float("inf"), device=CUDA)
    scores = memory[:, 3:60_003]
    scores.copy_(randn(9, 60_000))
    lengths = torch.arange(0, 63_000, 7000, device=CUDA)
    for row, length in enumerate(lengths.tolist()):
        scores[row, length:] = NAN
    assert torch.equal(top_positions(scores, 2048, lengths), sorted_top(scores, 2048, lengths))


def test_a_replay_selects_from_the_scores_and_lengths_of_the_moment() -> None:
    scores, lengths = randn(4, 40_000), torch.tensor([40_000, 30_000, 50, 0], device=CUDA)
    graph, selected = captured(lambda: top_positions(scores, 100, lengths))
    scores.copy_(scores.flip(1))
    lengths.copy_(lengths.flip(0))
    for _ in range(100):
        selected.fill_(-9)
        graph.replay()
        assert torch.equal(selected, sorted_top(scores, 100, lengths))


def test_no_rows() -> None:
    assert top_positions(randn(0, 100), 10).shape == (0, 10)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    scores = randn(4, 100)
    for wrong, k in ((scores.double(), 5), (scores[0], 5), (scores.cpu(), 5), (scores, 0)):
        with pytest.raises(ValueError, match="expected float32 scores"):
            top_positions(wrong, k)
    with pytest.raises(ValueError, match="side by side"):
        top_positions(scores.T, 2)
    lengths = torch.ones(4, dtype=torch.int64, device=CUDA)
    for wrong in (lengths[:3], lengths.float(), lengths.cpu(), lengths[:, None]):
        with pytest.raises(ValueError, match="expected contiguous int64 or int32 lengths"):
            top_positions(scores, 5, wrong)
