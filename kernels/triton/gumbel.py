"""Gumbel noise on scores, as a Triton kernel."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kernels.torch_ops import GOLDEN_GAMMA, MIX
from kernels.triton.launch import on

_BLOCK = 1024
_GOLDEN_GAMMA, _FIRST, _SECOND = (tl.constexpr(number) for number in (GOLDEN_GAMMA, *MIX))


def perturb(
    scores: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kernels.ops.Ops`."""
    rows, vocab = scores.shape
    scores, out = scores.contiguous(), torch.empty_like(scores)
    if rows:
        with on(scores.device):
            _perturb[(rows, triton.cdiv(vocab, _BLOCK))](
                scores, temperature, temperature.stride(0), keys, keys.stride(0), scores if tokens is None else tokens,
                out, vocab, named=tokens is not None, block=_BLOCK,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["vocab", "temperature_stride", "key_stride"])
def _perturb(
    scores: tensor, temperature: tensor, temperature_stride: tensor, keys: tensor, key_stride: tensor, tokens: tensor,
    out: tensor, vocab: tensor, named: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """Some tokens of a row. named: tokens has their ids."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < vocab
    score = tl.load(scores + row * vocab + column, mask=here)
    scale = tl.load(temperature + row * temperature_stride)
    if scale > 0:
        token = tl.load(tokens + column, mask=here, other=0) if named else column.to(tl.int64)
        number = (
            tl.load(keys + row * key_stride).to(tl.uint64, bitcast=True) + (token + 1).to(tl.uint64) * _GOLDEN_GAMMA
        )
        number = (number ^ (number >> 30)) * _FIRST
        number = (number ^ (number >> 27)) * _SECOND
        number = number ^ (number >> 31)
        uniform = ((number >> 12).to(tl.float64) + 0.5) * 2.0**-52
        score = score / scale - tl.log(-tl.log(uniform)).to(tl.float32)
    tl.store(out + row * vocab + column, score, mask=here)
