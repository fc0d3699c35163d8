"""What a device can compute with: Triton kernels or not, and what their launches depend on."""

import functools
import importlib
import os
import shutil
from typing import Any

import torch

MIN_TILE = 16
"""The least that a tensor core takes in any direction."""


def triton_obstacle() -> str | None:
    """Why this machine cannot compile Triton kernels; None if it can."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"needs the package triton, which cannot be imported ({error})"
    if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler at run time, and there is none (CC, cc, gcc or clang)"
    return None


@functools.cache
def has_triton() -> bool:
    """Whether this machine can compile Triton kernels."""
    return triton_obstacle() is None


def fuses(tensor: torch.Tensor) -> bool:
    """Whether one Triton kernel computes a chain of small operations on the tensor, instead of several torch kernels.

    It does in bfloat16 on a CUDA device. float32 is for reproducing the reference, operation by operation.
    """
    return tensor.is_cuda and tensor.dtype == torch.bfloat16 and has_triton()


def fp8_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this process does not compute with weights in block-fp8 on the device; None if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "needs a GPU that multiplies fp8 numbers as Hopper does"
    if dtype != torch.bfloat16:
        return "needs --dtype bfloat16"
    return triton_obstacle()


def tile_width(size: int) -> int:
    """The width of a tile that holds `size` elements."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


@functools.cache
def properties(device: torch.device) -> Any:
    """What CUDA says of a device."""
    return torch.cuda.get_device_properties(device)
