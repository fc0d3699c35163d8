"""The operations of a model that have several implementations.

`kernels.torch_ops` (plain torch, in transformers' order) and `kernels.triton` (bfloat16 on CUDA) have the functions of
`Ops`; `ops_for` chooses between the two. Kernels are imported where they are needed: a machine without a GPU need not
have Triton, nor what compiles csrc/.
"""

import functools
import importlib
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Protocol

import torch

from kernels import torch_ops
from kernels.operands import (
    Activations,
    BlockFp8,
    Pair,
    PartialSums,
    RmsNorm,
    Rope,
    RouterConfig,
    SwiGluWeights,
    Threshold,
)

PYTHON_HEADER = Path(sysconfig.get_paths()["include"], "Python.h")


class Ops(Protocol):
    """All implementations compute the same up to rounding. Launches depend on shapes alone, but where torch waits."""

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        norm: RmsNorm,
        fp8: BlockFp8 | None = None,
        room: Pair | None = None,
    ) -> tuple[torch.Tensor, Activations]:
        """hidden + addend, rounded, and the norm of that, all [N, dim]; no addend stands for zeros.

        addend: [N, dim], or float32 [parts, N, dim], whose sum over the parts is rounded and added. fp8: the norm is
        quantised, too. room: where values [N, dim] in contiguous rows and scales [N, ceil(dim / 128)] of any strides
        are written; None: new tensors.
        """

    def rotate(
        self, x: torch.Tensor, beside: torch.Tensor, rope: Rope, *, interleaved: bool, beside_first: bool
    ) -> torch.Tensor:
        """Rotate x, [N, heads, rope_dim], and concatenate it with `beside`, [N, heads, any width], unrotated.

        The members of a pair are neighbours in x (interleaved), or half its width apart (half-split). In the result all
        first members come before all second members.
        """

    def absorb(
        self, query_nope: torch.Tensor, query_rope: torch.Tensor, key_map: torch.Tensor, rope: Rope
    ) -> torch.Tensor:
        """Absorbed queries [N, heads, latent_dim + rope_dim]: the products with key_map, then the rotated part.

        query_nope: [N, heads, nope_dim]. query_rope: [N, heads, rope_dim]. key_map: [heads, nope_dim, latent_dim].
        """

    def float32_product(self, x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> PartialSums:
        """`scale` times x, [N, K], times the transpose of a weight of few rows, [M, K], in float32.

        weight: contiguous, of the type of x or float32.
        """

    def choose_experts(
        self,
        logits: PartialSums,
        bias: torch.Tensor,
        rule: RouterConfig,
        room: Pair | None = None,
        positions: torch.Tensor | None = None,
    ) -> Pair:
        """Weights, float32, and ids, int64, of the chosen experts, both [N, top_k], of logits [N, experts].

        bias: float32 [experts], added to the scores for the choice and not for the weights. room: where both are
        written, ids in int32 or int64; None: new tensors. positions: int64 [N], below 0 for padding, whose ids are -1.
        """

    def experts(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        is_part: bool,
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts, whose weights are in the dtype of hidden, [N, hidden_size].

        ids, weights: [N, top_k], ids counted from the first expert here. gate_up: [E, 2 * width, hidden_size]. down:
        [E, hidden_size, width]. is_part: ids may name experts that are not here, which contribute nothing.
        """

    def quantise(self, x: torch.Tensor, power_of_two: bool) -> Pair:
        """`kernels.fp8.quantise_activations` of x [N, K] in contiguous rows; scales have strides (1, N)."""

    def linear_fp8(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Quantised activations [N, K] times the transpose of a weight in block-fp8 [M, K].

        bfloat16 [N, M], or float32 [parts, N, M] (split-K), which `reduce_fp8` or `add_rms_norm` adds up.
        """

    def reduce_fp8(self, parts: torch.Tensor) -> torch.Tensor:
        """What `linear_fp8` returned, added up in order and rounded: bfloat16 [N, M]."""

    def mlp_fp8(self, x: torch.Tensor, x_scales: torch.Tensor, weights: SwiGluWeights) -> torch.Tensor:
        """down(silu(gate(x)) * up(x)) of quantised activations [N, H], by weights [2 * W, H] and [H, W]."""

    def experts_fp8(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: SwiGluWeights,
        shared: range | None = None,
    ) -> torch.Tensor:
        """`kernels.fp8.experts` of quantised activations [N, H]: bfloat16 [N, H]."""

    def find_threshold(self, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Threshold:
        """The threshold that keeps each row's top_k likeliest tokens, and of those the fewest that make up top_p.

        scaled: float32 [n, vocab], logits over temperature, less their maximum. top_k, top_p: float64 [n, 1], at least
        1 and above 0. The likeliest token always stays; top_p counts the probabilities that top_k leaves.
        """

    def perturb(
        self, scores: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """scores / temperature + Gumbel noise, whose largest is a sample of the softmax (the Gumbel-max trick:
        Maddison, Tarlow and Minka, NeurIPS 2014); the scores themselves where the temperature is 0.

        scores: float32 [n, vocab], finite or -inf. temperature: float32 [n]. keys: int64 [n]. tokens: int64 [vocab],
        the ids of the columns; None: their numbers. The noise of a token depends on the row's key and its id alone: it
        is number `id` of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) that starts at the key.
        """


def ops_for(x: torch.Tensor) -> Ops:
    """The operations on tensors of the device and the type of x.

    float32 gets torch everywhere: it is for reproducing the reference, operation by operation.
    """
    return ops_on(x.device) if x.dtype == torch.bfloat16 else torch_ops


@functools.cache
def ops_on(device: torch.device) -> Ops:
    """The operations of a device, of tensors in bfloat16 and of those that have one type only."""
    if device.type != "cuda" or triton_unavailable_reason() is not None:
        return torch_ops
    import kernels.triton

    return kernels.triton


def c_compiler() -> str | None:
    """The C compiler that Triton would use."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def triton_unavailable_reason() -> str | None:
    """Why this machine cannot compile Triton kernels and their launchers; None if it can."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"needs the package triton, which cannot be imported ({error})"
    if c_compiler() is None:
        return "needs a C compiler at run time, and there is none (CC, cc, gcc or clang)"
    if not PYTHON_HEADER.exists():
        return f"needs Python's headers at run time, and there is no {PYTHON_HEADER} (Debian: python3-dev)"
    return None


def fp8_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this process does not compute with weights in block-fp8 on the device; None if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "needs a GPU that multiplies fp8 numbers as Hopper does"
    if dtype != torch.bfloat16:
        return "needs --dtype bfloat16"
    return triton_unavailable_reason()
