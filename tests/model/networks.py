"""Parts of our network made of modules of transformers, and what all tensors of a network are."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kernels.operands import RouterConfig
from model.feed_forward import FeedForward, MixtureOfExperts, Router
from model.weights import Linear


def router_of(gate: Any) -> Router:
    """The router with the weights of a DeepseekV32TopkRouter or GlmMoeDsaTopkRouter."""
    config = RouterConfig(
        experts=gate.num_experts,
        top_k=gate.top_k,
        groups=gate.num_group,
        top_groups=gate.topk_group,
        normalise=gate.norm_topk_prob,
        scale=gate.routed_scaling_factor,
    )
    return Router(gate.weight, gate.e_score_correction_bias, config)


def mixture_of(module: Any, experts: range | None = None) -> MixtureOfExperts:
    """The mixture with the weights of a DeepseekV32MoE or GlmMoeDsaMoE, or a process's part of it."""
    own = experts or range(module.experts.num_experts)
    shared = module.shared_experts
    return MixtureOfExperts(
        router=router_of(module.gate),
        gate_up=Linear(module.experts.gate_up_proj[own.start : own.stop]),
        down=Linear(module.experts.down_proj[own.start : own.stop]),
        first=own.start,
        number=len(own),
        shared=FeedForward(
            Linear(torch.cat((shared.gate_proj.weight, shared.up_proj.weight))), Linear(shared.down_proj.weight)
        ),
    )


def tensors_of(part: Any) -> Iterator[torch.Tensor]:
    """All tensors of a network or of a part of it."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for member in part:
            yield from tensors_of(member)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))
