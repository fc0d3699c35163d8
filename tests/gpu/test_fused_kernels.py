"""The kernels that stand for chains of small operations, against these operations in plain torch."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kernels import torch_ops
from kernels.fp8 import quantise_activations
from kernels.operands import BlockFp8, PartialSums, RmsNorm, Rope, RouterConfig
from kernels.triton import add_rms_norm, choose_experts, float32_product, rotate
from kernels.triton.router import partial_products
from model.feed_forward import MixtureOfExperts, Router
from model.shard import RoutedTokens
from model.weights import Linear
from tests.gpu.test_attention_backends import CUDA, exactly, randn, rope_of
from tests.model.test_attention import random_attention

# Rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("beside_first", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "rope_dim", "width"),
    [(1, 1, 64, 512), (64, 128, 64, 512), (64, 64, 64, 64), (3, 20, 10, 7), (300, 3, 16, 48), (2000, 128, 64, 0)],
)
def test_rotation_is_that_of_torch_rounded_once(
    tokens: int, heads: int, rope_dim: int, width: int, beside_first: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    """Of parts of wider tensors, and beside one whose heads come before its tokens."""
    rope = rope_of(tokens, rope_dim, dtype)
    x = randn(tokens, heads, rope_dim + 6, dtype=dtype, seed=1)[..., 6:]
    beside = randn(heads, tokens, width, dtype=dtype, seed=2).transpose(0, 1)
    rotated = rotate(x, beside, rope, interleaved=interleaved, beside_first=beside_first)
    exact = torch_ops.rotate(
        x.double(), beside.double(), exactly(rope), interleaved=interleaved, beside_first=beside_first
    )
    step = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(rotated.double(), exact, rtol=step, atol=1e-6)


def test_many_queries_are_absorbed_in_place_as_few_are() -> None:
    attention, latents, rope = random_attention(CUDA, torch.bfloat16, tokens=1100, heads=128)
    many = attention.queries(latents, rope)
    assert many.shape == (1100, 128, 576)
    assert many.is_contiguous()
    parts = [
        attention.queries(latents[part], Rope(rope.cos[part], rope.sin[part]))
        for part in (slice(0, 550), slice(550, 1100))
    ]
    torch.testing.assert_close(many, torch.cat(parts), rtol=2**-7, atol=0.05)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    x, beside, angles = randn(2, 3, 8), randn(2, 3, 5), randn(2, 1, 4)
    for wrong in ((x, beside[:1], angles), (x, beside.bfloat16(), angles), (x, beside, angles[..., :2])):
        with pytest.raises(ValueError, match="expected x, beside and out"):
            rotate(*wrong[:2], Rope(wrong[2], wrong[2]), interleaved=True, beside_first=True)


@pytest.mark.parametrize("fp8", [None, BlockFp8(True), BlockFp8(False)])
@pytest.mark.parametrize("dim", [1536, 2048, 6144, 7168, 192])
@pytest.mark.parametrize("count", [1, 16, 3000])
def test_a_norm_adds_first_and_quantises_last(count: int, dim: int, fp8: BlockFp8 | None) -> None:
    wide = (3 * randn(count, dim + 704, seed=6)).bfloat16()
    norm = RmsNorm((1 + 0.1 * randn(dim, seed=7)).bfloat16(), 1e-6)
    parts = randn(3, count, dim, seed=8)
    whole = (parts[0] + parts[1] + parts[2]).bfloat16()
    for addend in (None, whole, parts):
        hidden = wide[:, :dim]
        summed, normed = add_rms_norm(hidden, addend, norm, fp8)
        assert torch.equal(summed, hidden if addend is None else hidden + whole)
        exact = F.rms_norm(summed.double(), (dim,), norm.weight.double(), norm.eps)
        torch.testing.assert_close(normed.dense.double(), exact, rtol=2**-8, atol=1e-6)
        if fp8 is None:
            assert normed.values is normed.scales is None
            continue
        values, scales = quantise_activations(normed.dense, fp8.power_of_two)
        assert normed.values is not None
        assert normed.scales is not None
        assert torch.equal(normed.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(normed.scales, scales)
        assert count == 1 or normed.scales.stride(0) == 1
        tokens = RoutedTokens.empty(count, dim, 8, hidden.device)
        in_rows = add_rms_norm(hidden, addend, norm, fp8, tokens.quantised)[1]
        assert torch.equal(in_rows.dense, normed.dense)
        assert torch.equal(tokens.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(tokens.scales, scales)


def router(experts: int, top_k: int, groups: int, top_groups: int, normalise: bool = True) -> Router:
    weight = (0.03 * randn(experts, 1024, seed=3)).bfloat16()
    config = RouterConfig(experts, top_k, groups, top_groups, normalise, scale=2.5)
    return Router(weight, 0.1 * randn(experts, seed=4), config)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "normalise"),
    [(32, 8, 8, 4, True), (256, 8, 8, 4, True), (256, 8, 1, 1, True), (30, 5, 3, 2, False), (8, 2, 1, 1, True)],
)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_a_token_gets_the_experts_that_torch_chooses(
    tokens: int, experts: int, top_k: int, groups: int, top_groups: int, normalise: bool
) -> None:
    rule = router(experts, top_k, groups, top_groups, normalise)
    logits = randn(tokens, experts, seed=5)
    weights, ids = choose_experts(PartialSums.of(logits), rule.bias, rule.config)
    their_weights, their_ids = torch_ops.choose_experts(PartialSums.of(logits), rule.bias, rule.config)
    assert ids.dtype == torch.int64
    same = (ids.sort(-1).values == their_ids.sort(-1).values).all(-1)
    assert same.float().mean() >= 0.99, "but for scores that differ in the last bit of a sigmoid"
    empty = torch.zeros_like(logits)
    ours, theirs = empty.scatter(1, ids, weights), empty.scatter(1, their_ids, their_weights)
    torch.testing.assert_close(ours[same], theirs[same], rtol=1e-5, atol=1e-6)
    rows = RoutedTokens.empty(tokens, 256, top_k, logits.device)
    choose_experts(PartialSums.of(logits), rule.bias, rule.config, rows.choice)
    assert torch.equal(rows.ids, ids.int())
    assert torch.equal(rows.weights, weights)
    positions = torch.arange(tokens, device=logits.device) % 3 - 1
    _, padded = choose_experts(PartialSums.of(logits), rule.bias, rule.config, positions=positions)
    assert torch.equal(padded, ids.masked_fill(positions[:, None] < 0, -1))


def test_bfloat16_is_routed_by_float32_logits() -> None:
    rule = router(256, 8, 8, 4)
    hidden = randn(200, 1024, dtype=torch.bfloat16, seed=6)
    weights, ids = rule.route(hidden)
    logits = torch_ops.float32_product(hidden, rule.weight)
    their_weights, their_ids = torch_ops.choose_experts(logits, rule.bias, rule.config)
    same = (ids.sort(-1).values == their_ids.sort(-1).values).all(-1)
    assert same.float().mean() >= 0.98, "but for scores that are equal as far as sums are exact"
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sort(-1).values[same], their_weights.sort(-1).values[same], rtol=1e-4, atol=1e-5)


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    rule = router(256, 8, 8, 4)
    logits = torch.full((3, 256), float("nan"), device=CUDA)
    logits[1, 7:] = 1.0
    _, ids = choose_experts(PartialSums.of(logits), rule.bias, rule.config)
    assert ((ids >= 0) & (ids < 256)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "channels"), [(256, 7168), (64, 7168), (32, 6144), (20, 300), (8, 64)])
@pytest.mark.parametrize("tokens", [1, 8, 17, 128, 300])
def test_parts_add_up_to_a_product_in_float32(tokens: int, rows: int, channels: int, dtype: torch.dtype) -> None:
    x = randn(tokens, channels, dtype=torch.bfloat16, seed=1)
    weight = 0.02 * randn(rows, channels, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().t()
    parts = partial_products(x, weight)
    assert parts.isfinite().all(), "all are written"
    off = (parts.double().sum(0) - exact).abs().max()
    theirs = (F.linear(x.float(), weight.float()).double() - exact).abs().max()
    assert off <= 4 * theirs + 1e-7, "no worse than float32 allows"
    sums = float32_product(x, weight, 0.5)
    torch.testing.assert_close(sums.reduce().double(), 0.5 * exact, rtol=1e-5, atol=float(8 * theirs + 1e-6))


@pytest.mark.parametrize("rows", [256, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_gets_the_same_sums_whoever_else_is_there(rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(128, 7168, dtype=torch.bfloat16, seed=1), 0.02 * randn(rows, 7168, dtype=dtype, seed=2)
    together = partial_products(x, weight)
    for some in (slice(0, 1), slice(5, 13), slice(100, 128), slice(1, 66)):
        assert torch.equal(partial_products(x[some], weight), together[:, some])


@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_grouped_experts_compute_what_each_expert_computes(tokens: int) -> None:
    experts, top_k, hidden_dim, width = 16, 4, 256, 128
    gate_up = 0.1 * randn(experts, 2 * width, hidden_dim, dtype=torch.bfloat16, seed=1)
    down = 0.1 * randn(experts, hidden_dim, width, dtype=torch.bfloat16, seed=2)
    gate = Router(
        0.1 * randn(experts, hidden_dim, dtype=torch.bfloat16, seed=3),
        0.1 * randn(experts, seed=4),
        RouterConfig(experts, top_k, 1, 1, True, scale=2.5),
    )
    hidden = randn(tokens, hidden_dim, dtype=torch.bfloat16, seed=5)
    weights, ids = gate.route(hidden)
    expected = torch.zeros(tokens, hidden_dim, dtype=torch.float64, device=CUDA)
    for token in range(tokens):
        for weight, number in zip(weights[token], ids[token].tolist(), strict=True):
            opened, up = (gate_up[number].double() @ hidden[token].double()).chunk(2)
            expected[token] += weight * (down[number].double() @ (F.silu(opened) * up))
    parts = [
        MixtureOfExperts(gate, Linear(gate_up[first:stop]), Linear(down[first:stop]), first, stop - first, None)
        for first, stop in ((0, 4), (4, 16))
    ]
    whole = MixtureOfExperts(gate, Linear(gate_up), Linear(down), 0, experts, None)
    off = whole.routed(hidden, ids, weights).double() - expected
    shared_out = sum(part.routed(hidden, ids, weights).double() for part in parts) - expected
    assert shared_out.norm() <= 0.01 * expected.norm()
    assert off.norm() <= 0.01 * expected.norm()
    assert off.abs().max() <= 0.03 * expected.abs().max()
