"""The kernels of block-fp8 weights in Triton's interpreter, against `kernels.fp8`."""

from types import SimpleNamespace

import pytest
import torch

from kernels import fp8
from kernels.operands import BlockFp8, RmsNorm, SwiGluWeights
from kernels.triton import add_rms_norm, experts_fp8, fp8_experts, linear_fp8, reduce_fp8, routing
from kernels.triton.fp8_quantise import quantise, swiglu_quantise
from kernels.triton.fp8_tile import Tiling
from kernels.triton.routing import sort_many_pairs, sort_pairs
from model.shard import RoutedTokens
from tests.kernels.fp8_cases import close, expected_experts, expert_case, randn, routed, weight
from tests.kernels.fp8_kernels import experts, linear, mlp


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 272), (5, 1152)])
def test_quantised_activations_are_those_of_the_reference(m: int, k: int, power_of_two: bool) -> None:
    x = randn(m, k).bfloat16()
    x[0, :128] *= 1e-6
    values, scales = quantise(x, power_of_two)
    expected, expected_scales = fp8.quantise_activations(x, power_of_two)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scales, expected_scales)
    assert scales.stride(0) == 1


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (3, 200, 272), (17, 72, 1152), (5, 130, 4096), (70, 140, 400)])
def test_a_linear_layer(m: int, n: int, k: int) -> None:
    x, (values, scales) = randn(m, k).bfloat16(), weight(n, k)
    product = linear(x, values, scales, True)
    close(product, fp8.linear(x, values, scales, True))
    assert torch.equal(product, reduce_fp8(linear_fp8(*quantise(x, True), values, scales)))


@pytest.mark.parametrize("adds", [None, 0, 3])
@pytest.mark.parametrize("fp8_of", [None, BlockFp8(False), BlockFp8(True)])
@pytest.mark.parametrize(("count", "dim"), [(1, 128), (3, 272), (2, 1152)])
def test_a_norm_adds_first_and_quantises_last(count: int, dim: int, fp8_of: BlockFp8 | None, adds: int | None) -> None:
    wide = 3 * randn(count, dim + 16).bfloat16()
    hidden, norm = wide[:, :dim], RmsNorm(1 + randn(dim).bfloat16(), 1e-6)
    addend = None if adds is None else randn(adds, count, dim) if adds else randn(count, dim).bfloat16()
    summed, normed = add_rms_norm(hidden, addend, norm, fp8_of)
    expected = hidden if addend is None else hidden + (reduce_fp8(addend) if adds else addend)
    assert torch.equal(summed, expected)
    close(normed.dense, norm(expected), 0.01)
    if fp8_of is None:
        assert normed.values is normed.scales is None
    else:
        values, scales = quantise(normed.dense, fp8_of.power_of_two)
        assert normed.values is not None
        assert normed.scales is not None
        assert torch.equal(normed.values.float(), values.float())
        assert torch.equal(normed.scales, scales)
        assert normed.scales.stride(0) == 1


@pytest.mark.parametrize(("count", "dim"), [(1, 128), (3, 272)])
def test_a_norm_quantises_into_rows(count: int, dim: int) -> None:
    hidden, weights = randn(count, dim).bfloat16(), 1 + randn(dim).bfloat16()
    tokens = RoutedTokens.empty(count + 2, dim, 3, hidden.device)
    tokens.rows.fill_(0x55)
    norm = RmsNorm(weights, 1e-6)
    _, normed = add_rms_norm(hidden, None, norm, BlockFp8(True), tokens[1:-1].quantised)
    values, scales = fp8.quantise_activations(normed.dense, True)
    expected = torch.full_like(tokens.rows, 0x55)
    expected[1:-1, : dim + 4 * fp8.blocks(dim)] = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)
    assert torch.equal(tokens.rows, expected)
    with pytest.raises(ValueError, match="expected room for values"):
        add_rms_norm(hidden, None, norm, BlockFp8(True), tokens.quantised)


def test_a_feed_forward_layer() -> None:
    x, gate_up, down = randn(18, 256).bfloat16(), weight(512, 256), weight(192, 256)
    inner = fp8.swiglu(fp8.linear(x, *gate_up, False))
    close(mlp(x, SwiGluWeights(*gate_up, *down)), fp8.linear(inner, *down, False), 0.01)


def test_swiglu_of_sums() -> None:
    partial = randn(3, 4, 512)
    rows = torch.tensor([2])
    values, scales = swiglu_quantise(partial, False, rows)
    inner = fp8.swiglu((partial[0] + partial[1] + partial[2]).bfloat16())
    expected, expected_scales = fp8.quantise_activations(inner, False)
    assert torch.equal(values[:2].float(), expected[:2].float())
    assert torch.equal(scales[:2], expected_scales[:2])


@pytest.mark.parametrize(("tokens", "block_m"), [(1, 16), (37, 4), (100, 16)])
def test_pairs_are_sorted_by_expert(tokens: int, block_m: int) -> None:
    ids = torch.randint(0, 12, (tokens, 3), generator=torch.Generator().manual_seed(1))
    order = sort_pairs(ids, 4, 5, block_m)
    rows, tiles = order.counts.tolist()
    of = [(ids.flatten() == expert).nonzero().squeeze(1) for expert in range(4, 9)]
    assert torch.equal(order.pairs[:rows].long(), torch.cat(of))
    assert torch.equal(order.row[torch.cat(of)].long(), torch.arange(rows))
    expected, first = [], 0
    for expert, pairs in enumerate(of):
        end = first + len(pairs)
        expected += [[expert, row, end] for row in range(first, end, block_m)]
        first = end
    assert order.tiles[:tiles].tolist() == expected
    assert tiles <= len(order.tiles)
    apart = torch.full((tokens, 9), 5, dtype=torch.int32)
    apart[:, 2:5] = ids
    again = sort_pairs(apart[:, 2:5], 4, 5, block_m)
    assert torch.equal(again.counts, order.counts)
    assert torch.equal(again.pairs[:rows], order.pairs[:rows])
    assert torch.equal(again.row[torch.cat(of)], order.row[torch.cat(of)])
    assert torch.equal(again.tiles[:tiles], order.tiles[:tiles])


@pytest.mark.parametrize("shared", [None, range(3, 30), range(0)])
@pytest.mark.parametrize(("tokens", "block_m"), [(37, 4), (100, 16)])
def test_many_pairs_are_sorted_by_expert(tokens: int, block_m: int, shared: range | None) -> None:
    ids = torch.randint(0, 12, (tokens, 3), generator=torch.Generator().manual_seed(1))
    chosen = 5
    order = sort_many_pairs(ids, 4, chosen + (shared is not None), block_m, shared)
    end, tiles = order.counts.tolist()
    of = [(ids.flatten() == expert).nonzero().squeeze(1).tolist() for expert in range(4, 4 + chosen)]
    of += [] if shared is None else [[3 * token for token in shared]]
    pairs, table = [], []
    for expert, expected in enumerate(of):
        first = len(pairs)
        table += [[expert, row, first + len(expected)] for row in range(first, first + len(expected), block_m)]
        last_end = first + len(expected)
        if expert < chosen:
            assert order.row[torch.tensor(expected, dtype=torch.int64)].tolist() == list(range(first, last_end))
        pairs += expected + [-1] * (-len(expected) % block_m)
    assert (end, tiles) == (last_end, len(table))
    assert order.tiles[:tiles].tolist() == table
    assert order.pairs.tolist() == pairs + [-1] * (len(order.pairs) - len(pairs))


@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "hidden", "width"), [(1, 2, 3, 272, 128), (9, 4, 4, 256, 256), (40, 2, 3, 1280, 128)]
)
def test_experts(tokens: int, top_k: int, count: int, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = expert_case(tokens, top_k, count, hidden, width, first=2)
    whole = experts(*case)
    close(whole, expected_experts(*case), 0.01)
    monkeypatch.setattr(fp8_experts, "_SPLIT_PAIRS", 0 if tokens * top_k <= 64 else 1 << 20)
    assert torch.equal(experts(*case), whole), "however the channels are shared"
    shared = range(tokens // 3, tokens)
    close(experts(*case, shared), expected_experts(*case, shared), 0.01)
    rows = routed(*case[:3], True)
    assert torch.equal(experts_fp8(*rows.quantised, rows.ids, rows.weights, case[3]), whole)


@pytest.mark.parametrize("n", [128, 256])
def test_experts_of_many_tokens(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_experts, "FEW", 0)
    monkeypatch.setattr(routing, "_SKIP_TOKENS", 0)
    monkeypatch.setattr(fp8_experts, "_MOST", 24)
    monkeypatch.setattr(fp8_experts, "tiling", lambda tokens: Tiling(32, n, 4, 2, 1, tokens_left=True))
    case = expert_case(40, 2, 3, 272, 128, first=2, power_of_two=False)
    close(experts(*case), expected_experts(*case), 0.01)
    rows = routed(*case[:3], False)
    close(experts_fp8(*rows.quantised, rows.ids, rows.weights, case[3]), expected_experts(*case), 0.01)
    for shared in (range(3, 30), range(30, 40), range(0)):
        close(experts(*case, shared), expected_experts(*case, shared), 0.01)


@pytest.mark.parametrize("tokens", [40, 300])
def test_experts_of_many_tokens_by_another_product(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepGEMM is given: rows that lie together, of one expert in each 128."""
    given: list[list[int]] = []

    def product(
        x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor
    ) -> torch.Tensor:
        assert expert.dtype == torch.int32
        assert len(x) == len(expert)
        assert x_scales.stride() == (1, len(x))
        assert (expert.view(-1, 128) == expert[::128, None]).all()
        given.append(expert[::128].tolist())
        dense = x.float() * x_scales.repeat_interleave(128, 1)
        of_row = fp8.dequantise(weight, scales, torch.float32)
        by_expert = [tile @ of_row[number].T for tile, number in zip(dense.split(128), given[-1], strict=True)]
        return torch.cat(by_expert).bfloat16()

    monkeypatch.setattr(fp8_experts, "FEW", 0)
    monkeypatch.setattr(routing, "_SKIP_TOKENS", 0)
    monkeypatch.setattr(fp8_experts, "_MOST", 150)
    library = SimpleNamespace(grouped_product=product)
    monkeypatch.setattr(fp8_experts, "deep_gemm", lambda tokens, device: library)
    case = expert_case(tokens, 2, 3, 2304, 128, first=2, power_of_two=False)
    close(experts(*case), expected_experts(*case), 0.01)
    assert len(given) == (2 if tokens == 40 else 4), "two products of all rows, or of each half"
    assert given[0] == given[1] == sorted(given[0])
    rows = routed(*case[:3], False)
    close(experts_fp8(*rows.quantised, rows.ids, rows.weights, case[3]), expected_experts(*case), 0.01)
    for shared in (range(3, 30), range(30, 40), range(0)):
        close(experts(*case, shared), expected_experts(*case, shared), 0.01)
    elsewhere = (case[0], torch.zeros_like(case[1]), *case[2:])
    monkeypatch.setattr(library, "grouped_product", lambda x, x_scales, weight, *_: x.new_empty(0, weight.shape[1]))
    assert (experts(*elsewhere) == 0).all(), "no token has chosen an expert of this rank"


def test_what_is_no_number_stays_none() -> None:
    x, (values, scales) = randn(2, 256).bfloat16(), weight(64, 256)
    x[0, 3] = float("nan")
    product = linear(x, values, scales, False)
    assert product[0].isnan().all()
    assert product[1].isfinite().all()
