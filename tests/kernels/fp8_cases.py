"""Weights, inputs and tolerances of tests of block-fp8 products."""

import torch

from kernels import fp8
from kernels.operands import SwiGluWeights
from model.shard import RoutedTokens


def randn(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def weight(
    *shape: int, device: str = "cpu", seed: int = 1, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a weight [..., N, K] whose blocks are of different magnitudes."""
    values, scales = fp8.quantise_weight(randn(*shape, device=device, seed=seed) / shape[-1] ** 0.5, power_of_two)
    sizes = torch.randint(-2, 3, scales.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return values, scales * 2.0**sizes


def expert_case(
    tokens: int,
    top_k: int,
    count: int,
    hidden: int,
    width: int,
    of: int = 0,
    first: int = 0,
    power_of_two: bool = True,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SwiGluWeights]:
    """hidden, ids and weights of tokens that choose from `of` experts, and `count` of these from `first` on."""
    ids = torch.rand(tokens, of or count + 3, generator=torch.Generator().manual_seed(2)).topk(top_k).indices
    x = randn(tokens, hidden, device=device, seed=3).bfloat16()
    weights = randn(tokens, top_k, device=device, seed=4).sigmoid()
    gate_up = weight(count, 2 * width, hidden, device=device, seed=5)
    down = weight(count, hidden, width, device=device, seed=6)
    return x, ids.to(device), weights, SwiGluWeights(*gate_up, *down, power_of_two, first)


def part_of(experts: SwiGluWeights, own: slice) -> SwiGluWeights:
    """Some of the experts."""
    parts = (experts.gate_up, experts.gate_up_scales, experts.down, experts.down_scales)
    return SwiGluWeights(*(part[own] for part in parts), experts.power_of_two, own.start)


def routed(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, power_of_two: bool) -> RoutedTokens:
    """Tokens [T, H] and their experts [T, k] in rows of bytes, between other rows."""
    tokens = RoutedTokens.empty(len(hidden) + 2, hidden.shape[1], ids.shape[1], hidden.device)
    tokens.rows.fill_(0x7F)
    tokens = tokens[1:-1]
    written = (*fp8.quantise_activations(hidden, power_of_two), weights, ids)
    for room, part in zip((*tokens.quantised, *tokens.choice), written, strict=True):
        room.copy_(part)
    return tokens


def expected_experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, of: SwiGluWeights, shared: range | None = None
) -> torch.Tensor:
    """What experts compute of tokens that are not quantised yet."""
    quantised = fp8.quantise_activations(hidden, of.power_of_two)
    return fp8.experts(*quantised, ids, weights, of, shared, dtype=hidden.dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 0.003) -> None:
    """Apart by what bfloat16 rounds, and no element by much more."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    off = ours.double() - theirs.double()
    assert off.norm() <= tolerance * theirs.double().norm(), f"{off.norm() / theirs.double().norm():.5f}"
    assert off.abs().max() <= 8 * tolerance * theirs.double().abs().max()
