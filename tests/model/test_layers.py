"""The parts of a layer against the modules of transformers whose weights they use."""

from functools import partial
from typing import Any

import pytest
import torch
from networks import mixture_of, router_of
from transformers import AutoConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32MoE, DeepseekV32RMSNorm
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

from kernels.operands import RmsNorm
from kernels.torch_ops import experts_all_at_once, experts_grouped
from model.feed_forward import MixtureOfExperts

# experts, of which a token gets, groups, of which a token gets, weights are normalised
ROUTERS = [(32, 8, 8, 4, True), (256, 8, 8, 4, True), (256, 8, 1, 1, True), (12, 3, 4, 2, False), (8, 8, 1, 1, True)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixture(module: type, experts: int, top_k: int, groups: int, top_groups: int, normalise: bool) -> Any:
    config = AutoConfig.for_model(
        "glm_moe_dsa" if module is GlmMoeDsaMoE else "deepseek_v32",
        hidden_size=48,
        moe_intermediate_size=16,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    made = module(config).eval().requires_grad_(False)
    for number, parameter in enumerate(made.parameters()):
        parameter.copy_(0.2 * randn(*parameter.shape, seed=number))
    made.gate.e_score_correction_bias.copy_(0.1 * randn(experts, seed=99))
    return made


@pytest.mark.parametrize("module", [DeepseekV32MoE, GlmMoeDsaMoE])
@pytest.mark.parametrize("shape", ROUTERS)
def test_tokens_get_experts_and_weights_of_the_reference(module: type, shape: tuple[int, int, int, int, bool]) -> None:
    gate = mixture(module, *shape).gate
    hidden = randn(50, 48)
    _, their_weights, their_ids = gate(hidden)
    weights, ids = router_of(gate).route(hidden)
    assert torch.equal(ids, their_ids)
    assert torch.equal(weights, their_weights)
    assert shape[2] == 1 or not torch.equal(
        ids, router_of(mixture(module, *shape[:2], 1, 1, True).gate).route(hidden)[1]
    )


@pytest.mark.parametrize("module", [DeepseekV32MoE, GlmMoeDsaMoE])
def test_a_mixture_of_experts_computes_what_the_reference_computes(module: type) -> None:
    reference = mixture(module, 32, 8, 8, 4, True)
    hidden = randn(20, 48)
    ours = mixture_of(reference)
    weights, ids = ours.router.route(hidden)
    assert torch.equal(ours.routed(hidden, ids, weights), reference.experts(hidden, ids, weights))
    norm = RmsNorm(1 + 0.1 * randn(48, seed=1), 1e-6)
    summed, output = ours.forward_normed(norm, hidden, hidden)
    assert torch.equal(summed, 2 * hidden)
    torch.testing.assert_close(output, reference(norm(summed)[None])[0], rtol=1e-5, atol=1e-5)


def test_processes_that_share_the_experts_add_up_to_the_reference() -> None:
    reference = mixture(DeepseekV32MoE, 32, 8, 8, 4, True)
    hidden = randn(20, 48)
    weights, ids = router_of(reference.gate).route(hidden)
    parts = [mixture_of(reference, range(8 * rank, 8 * rank + 8)) for rank in range(4)]
    expected = reference.experts(hidden, ids, weights)
    close = partial(torch.testing.assert_close, expected=expected)
    close(sum(part.routed(hidden, ids, weights) for part in parts), rtol=1e-5, atol=1e-5)
    computed = [experts_all_at_once(hidden, ids - part.first, weights, *weights_of(part)) for part in parts]
    close(sum(computed), rtol=1e-5, atol=1e-5)
    parts = [mixture_of(reference.bfloat16(), range(8 * rank, 8 * rank + 8)) for rank in range(4)]
    hidden = hidden.bfloat16()
    computed = [experts_grouped(hidden, ids - part.first, weights, *weights_of(part), True) for part in parts]
    close(sum(computed).float(), rtol=0.02, atol=0.05)


def weights_of(part: MixtureOfExperts) -> tuple[torch.Tensor, torch.Tensor]:
    return part.gate_up.weight, part.down.weight


def test_grouped_experts_are_the_references() -> None:
    reference = mixture(DeepseekV32MoE, 32, 8, 8, 4, True).bfloat16()
    hidden = randn(20, 48).bfloat16()
    weights, ids = router_of(reference.gate).route(hidden)
    computed = experts_grouped(hidden, ids, weights, *weights_of(mixture_of(reference)), False)
    torch.testing.assert_close(computed, reference.experts(hidden, ids, weights), rtol=0.02, atol=0.05)


def test_a_norm_is_the_references_in_float32() -> None:
    module = DeepseekV32RMSNorm(48, eps=1e-3).requires_grad_(False)
    module.weight.copy_(1 + 0.1 * randn(48))
    hidden = 0.03 * randn(20, 2, 48, seed=1)
    assert torch.equal(RmsNorm(module.weight, 1e-3)(hidden), module(hidden))


def test_a_norm_rounds_no_more_than_the_reference_in_bfloat16() -> None:
    module = DeepseekV32RMSNorm(48, eps=1e-3).requires_grad_(False)
    module.weight.copy_(1 + 0.1 * randn(48))
    hidden = randn(200, 48, seed=1).bfloat16()
    rounded = module.bfloat16()
    exact = RmsNorm(rounded.weight.double(), 1e-3)(hidden.double())
    ours = RmsNorm(rounded.weight, 1e-3)(hidden)
    errors = [(normed.double() - exact).abs().mean() for normed in (ours, rounded(hidden))]
    assert 0 < errors[0] <= errors[1]
