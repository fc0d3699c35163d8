"""Products of a prompt by DeepGEMM (github.com/deepseek-ai/DeepGEMM), where `sgl-deep-gemm` is installed."""

import importlib.util
from functools import cache
from typing import Any

import structlog
import torch

from kernels.fp8 import BLOCK, FP8

_MOST_OF_A_STEP = 2048
"""A decode step's tokens at most. Its products never wait for the device, and add up in one order."""

_CHUNK_UNIT = 1024
"""The tokens of a whole chunk are a multiple of it. For other numbers of rows DeepGEMM may have to compile kernels,
while requests wait."""

ROWS = 128
"""Rows of an expert begin at a multiple of it."""

log = structlog.get_logger(__name__)


class DeepGemm:
    """x: fp8 [M, K]; x_scales: float32 [M, K / 128] of strides (1, M); products are bfloat16 [M, N]."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """M is a multiple of 4, N of 16 and K of 128. weight: fp8 [N, K]; scales: float32 [N / 128, K / 128]."""
        out = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device=x.device)
        self._library.fp8_gemm_nt((x, x_scales), (weight, scales), out)
        return out

    def grouped_product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor
    ) -> torch.Tensor:
        """weight and scales of all experts [E, ...]. expert: int32 [M], whose row it is, the same in every `ROWS`."""
        out = torch.empty(len(x), weight.shape[1], dtype=torch.bfloat16, device=x.device)
        if len(x):
            self._library.m_grouped_fp8_gemm_nt_contiguous((x, x_scales), (weight, scales), out, expert)
        return out


def deep_gemm(tokens: int, device: torch.device) -> DeepGemm | None:
    """The library, if it is installed and works on this device, and these are the tokens of whole chunks of prompts."""
    return None if tokens <= _MOST_OF_A_STEP or tokens % _CHUNK_UNIT else _on(device)


@cache
def _on(device: torch.device) -> DeepGemm | None:
    """The library, if it multiplies small matrices right. Logs what was found."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    try:
        library = importlib.import_module("deep_gemm")
    except Exception as error:
        log.warning("DeepGEMM does not load: prompts are computed without it", error=str(error))
        return None
    try:
        alignment = library.get_mk_alignment_for_contiguous_layout()
        if ROWS % alignment:
            raise ValueError(f"its rows of an expert begin at multiples of {alignment}")
        products = DeepGemm(library)
        _check(products, device)
    except Exception as error:
        log.warning("DeepGEMM does not work: prompts are computed without it", error=str(error))
        return None
    log.info("prompts are computed by DeepGEMM")
    return products


def _check(products: DeepGemm, device: torch.device) -> None:
    """Raise ValueError if products of small integers, which are exact, are not what they are."""
    k, n = 2 * BLOCK, BLOCK
    x = (torch.arange(2 * ROWS * k, device=device) % 7 - 3).view(2 * ROWS, k)
    weight = (torch.arange(2 * n * k, device=device) % 5 - 2).view(2, n, k)
    x_scales = torch.ones(k // BLOCK, 2 * ROWS, device=device).t()
    scales = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]], device=device)
    expert = torch.arange(2, dtype=torch.int32, device=device).repeat_interleave(ROWS)
    small, small_weight = x.to(FP8), weight.to(FP8)
    scaled = (weight * scales.repeat_interleave(BLOCK, 2)).double()
    for found, expected in (
        (products.product(small, x_scales, small_weight[0], scales[0]), x.double() @ scaled[0].T),
        (
            products.grouped_product(small, x_scales, small_weight, scales, expert),
            torch.einsum("erk,enk->ern", x.view(2, ROWS, k).double(), scaled).view(2 * ROWS, n),
        ),
    ):
        if not torch.equal(found.double(), expected.bfloat16().double()):
            raise ValueError("a small product is wrong")
