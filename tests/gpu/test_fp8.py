"""Kernels of block-fp8 weights against the plain-torch reference, from the same quantised numbers."""

from dataclasses import replace

import pytest
import torch

from kernels import fp8
from kernels.operands import RmsNorm, RouterConfig, SwiGluWeights
from model.feed_forward import MixtureOfExperts, Router
from model.weights import Linear
from tests.kernels.fp8_cases import close, expected_experts, expert_case, part_of, randn, routed, weight

pytest.importorskip("triton")

from kernels.ops import fp8_unavailable_reason
from kernels.triton import add_rms_norm, experts_fp8, fp8_experts, linear_fp8, quantise, reduce_fp8
from kernels.triton.fp8_linear import FEW
from tests.gpu.test_attention_backends import captured
from tests.kernels.fp8_kernels import experts, linear, mlp

CUDA = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or fp8_unavailable_reason(torch.device(CUDA, 0), torch.bfloat16) is not None,
    reason="needs a GPU that multiplies fp8",
)

TOKENS = (1, 2, 8, 16, 17, 63, 64, 65, 512, 4096)
ODD = [(200, 272), (72, 1152), (576, 400), (130, 4096)]
REAL = [(2240, 7168), (24576, 1536), (7168, 2048), (4096, 7168)]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 7168), (65, 272), (4096, 1536)])
def test_quantised_activations_are_those_of_the_reference(m: int, k: int, power_of_two: bool) -> None:
    x = (randn(m, k, device=CUDA) * torch.logspace(-6, 3, m, device=CUDA)[:, None]).bfloat16()
    values, scales = quantise(x, power_of_two)
    expected, expected_scales = fp8.quantise_activations(x, power_of_two)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())


def test_activations_may_be_part_of_wider_rows() -> None:
    whole = randn(20, 1024, device=CUDA).bfloat16()
    values, scales = weight(256, 512, device=CUDA)
    for m in (3, 20):
        assert torch.equal(
            linear(whole[:m, 256:768], values, scales, True), linear(whole[:m, 256:768].clone(), values, scales, True)
        )


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize(("n", "k"), ODD + REAL)
def test_a_linear_layer(m: int, n: int, k: int) -> None:
    x = randn(m, k, device=CUDA).bfloat16()
    values, scales = weight(n, k, device=CUDA)
    for power_of_two in (False, True):
        product = linear(x, values, scales, power_of_two)
        close(product, fp8.linear(x, values, scales, power_of_two))
        again = reduce_fp8(linear_fp8(*quantise(x, power_of_two), values, scales))
        assert torch.equal(product, again)


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_the_largest_layer(m: int) -> None:
    x = randn(m, 16384, device=CUDA).bfloat16()
    values, scales = weight(7168, 16384, device=CUDA)
    product = linear(x, values, scales, True)
    close(product, fp8.linear(x, values, scales, True))
    exact = x.double()[:64] @ fp8.dequantise(values, scales, torch.float64).t()
    off = (product[:64].double() - exact).norm() / exact.norm()
    assert off < 0.04, "what quantising activations costs"


@pytest.mark.parametrize(("n", "k"), [(200, 272), (2240, 7168), (7168, 16384)])
def test_a_token_gets_the_same_among_few_whoever_they_are(n: int, k: int) -> None:
    x = randn(FEW, k, device=CUDA).bfloat16()
    values, scales = weight(n, k, device=CUDA)
    among = linear(x, values, scales, False)
    for count in (1, 5, 16, 17, 32, 40):
        assert torch.equal(linear(x[:count], values, scales, False), among[:count])


@pytest.mark.parametrize("m", [1, 16, 40, 100, 600])
def test_a_feed_forward_layer(m: int) -> None:
    x, gate_up, down = (
        randn(m, 7168, device=CUDA).bfloat16(),
        weight(4096, 7168, device=CUDA),
        weight(7168, 2048, device=CUDA),
    )
    inner = fp8.swiglu(fp8.linear(x, *gate_up, True))
    close(mlp(x, SwiGluWeights(*gate_up, *down, True)), fp8.linear(inner, *down, True), 0.01)


@pytest.mark.parametrize("tokens", [1, 2, 8, 63, 65, 512, 700, 1500, 9000])
@pytest.mark.parametrize(
    ("top_k", "count", "of", "hidden", "width"), [(8, 32, 256, 1024, 256), (3, 5, 8, 400, 384), (2, 4, 4, 272, 128)]
)
def test_experts(
    tokens: int, top_k: int, count: int, of: int, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_experts, "_MOST", 4096)
    first = min(2, of - count)
    case = expert_case(tokens, top_k, count, hidden, width, of, first, power_of_two=False, device=CUDA)
    close(experts(*case), expected_experts(*case), 0.01)
    case = (*case[:3], replace(case[3], power_of_two=True))
    rows = routed(*case[:3], True)
    apart = experts_fp8(*rows.quantised, rows.ids, rows.weights, case[3])
    assert torch.equal(apart, experts(*case)), "wherever rows lie"
    close(apart, expected_experts(*case), 0.01)


@pytest.mark.parametrize("tokens", [8, 128, 2048])
def test_experts_of_real_shapes(tokens: int) -> None:
    case = expert_case(tokens, 8, 32, 7168, 2048, 256, first=64, device=CUDA)
    close(experts(*case), expected_experts(*case), 0.01)


def test_a_token_gets_the_same_from_experts_among_few_whoever_they_are() -> None:
    x, ids, weights, of = expert_case(fp8_experts.FEW, 8, 32, 7168, 2048, 256, first=64, device=CUDA)
    among = experts(x, ids, weights, of)
    for count in (1, 4, 5, 16, 17, 130, 513, 1100):
        assert torch.equal(experts(x[:count], ids[:count], weights[:count], of), among[:count])


@pytest.mark.parametrize("tokens", [1, 40, 9000])
def test_an_expert_that_all_share_may_be_one_of_them(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_experts, "_MOST", 4096)
    x, ids, weights, of = expert_case(tokens, 2, 5, 512, 256, 4, device=CUDA)
    own = range(tokens // 2, tokens)
    routed = experts(x, ids, weights, part_of(of, slice(0, 4))).float()
    routed[own.start :] += mlp(x[own.start :], of[4]).float()
    close(experts(x, ids, weights, of, own), routed.bfloat16(), 0.005)


@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_a_mixture_reads_what_its_norm_and_router_write(tokens: int) -> None:
    hidden, addend = (randn(tokens, 1024, device=CUDA, seed=seed).bfloat16() for seed in (1, 2))
    norm = RmsNorm((1 + 0.1 * randn(1024, device=CUDA)).bfloat16(), 1e-6)
    chooser = (0.05 * randn(32, 1024, device=CUDA, seed=3)).bfloat16()
    router = Router(chooser, 0.1 * randn(32, device=CUDA, seed=4), RouterConfig(32, 8, 8, 4, True, 2.5))
    gate_up, down = weight(33, 512, 1024, device=CUDA), weight(33, 1024, 256, device=CUDA)
    mixture = MixtureOfExperts(router, Linear(*gate_up, True), Linear(*down, True), 0, 32, None)
    normed = add_rms_norm(hidden, addend, norm)[1].dense
    weights, ids = router.route(normed)
    expected = expected_experts(normed, ids, weights, SwiGluWeights(*gate_up, *down, True), range(tokens))
    graph, (summed, output) = captured(lambda: mixture.forward_normed(norm, hidden, addend))
    output.zero_()
    graph.replay()
    assert torch.equal(summed, hidden + addend)
    close(output, expected, 0.01)


def test_tokens_that_chose_no_expert_here_get_zeros() -> None:
    assert not experts(*expert_case(9, 2, 4, 512, 256, 8, first=100, device=CUDA)).any()


def test_a_replay_computes_what_is_there_at_the_moment() -> None:
    x, ids, weights, of = expert_case(33, 8, 32, 1024, 256, 256, device=CUDA)
    layer = weight(2240, 1024, device=CUDA)
    graph, (routed, product) = captured(lambda: (experts(x, ids, weights, of), linear(x, *layer, True)))
    x.copy_(x.flip(0) * 2)
    ids.copy_((ids + 40) % 256)
    graph.replay()
    assert torch.equal(routed, experts(x, ids, weights, of))
    assert torch.equal(product, linear(x, *layer, True))


@pytest.mark.parametrize("m", [3, 20, 100])
def test_what_is_no_number_stays_with_its_token(m: int) -> None:
    x, ids, weights, of = expert_case(m, 2, 4, 512, 256, 4, power_of_two=False, device=CUDA)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    for result in (linear(x, *weight(384, 512, device=CUDA), False), experts(x, ids, weights, of)):
        assert not result[1].isfinite().any()
        assert not result[2].isfinite().any()
        assert result[[0, *range(3, m)]].isfinite().all()


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    x, ids, weights, of = expert_case(4, 2, 3, 512, 256, device=CUDA)
    with pytest.raises(ValueError, match="expected contiguous x"):
        linear(x[:, :256], of.gate_up[0], of.gate_up_scales[0], True)
    with pytest.raises(ValueError, match="expected x"):
        experts_fp8(*quantise(x, True), ids[:3], weights, of)
    with pytest.raises(ValueError, match="multiple of 16 channels"):
        linear(x[:, :24], *weight(64, 24, device=CUDA), True)
