"""`kernels.ops.Ops` of bfloat16 on CUDA: one Triton kernel, or a few, where torch has a chain of small ones.

Imported only where it was chosen (`kernels.ops`): a machine without a GPU need not have Triton. Attention is in
`kernels.triton.attention`, which also needs what compiles csrc/.
"""

import torch

from kernels.operands import Rope
from kernels.torch_ops import experts_grouped as experts
from kernels.triton.fp8_experts import experts_fp8
from kernels.triton.fp8_linear import linear_fp8, mlp_fp8, reduce_fp8
from kernels.triton.fp8_quantise import quantise
from kernels.triton.gumbel import perturb
from kernels.triton.norm import add_rms_norm
from kernels.triton.rope import rotate
from kernels.triton.router import choose_experts, float32_product
from kernels.triton.thresholds import find_threshold

__all__ = [
    "absorb", "add_rms_norm", "choose_experts", "experts", "experts_fp8", "find_threshold", "float32_product",
    "linear_fp8", "mlp_fp8", "perturb", "quantise", "reduce_fp8", "rotate",
]  # fmt: skip

MANY_QUERIES = 1024
"""Tokens whose absorbed queries cost more to copy than a launch does: 8192 with 128 heads of 512 have 1 GB of them."""


def absorb(query_nope: torch.Tensor, query_rope: torch.Tensor, key_map: torch.Tensor, rope: Rope) -> torch.Tensor:
    """See `kernels.ops.Ops`. Of many tokens in one launch more and without a copy of what is absorbed."""
    tokens, heads, rope_dim = query_rope.shape
    if tokens < MANY_QUERIES:
        absorbed = torch.einsum("nhd,hdr->nhr", query_nope, key_map)
        return rotate(query_rope, absorbed, rope, interleaved=True, beside_first=True)
    queries = query_nope.new_empty(tokens, heads, key_map.shape[2] + rope_dim)
    absorbed, rotated = queries.tensor_split((key_map.shape[2],), dim=-1)
    torch.bmm(query_nope.transpose(0, 1), key_map, out=absorbed.transpose(0, 1))
    rotate(query_rope, query_rope[..., :0], rope, interleaved=True, beside_first=True, out=rotated)
    return queries
