"""Which implementation of an operation a device and a type get: `kernels.torch_ops` or `kernels.triton`.

This module and `kernels.attention` import kernels where they are needed: a machine without a GPU need not have Triton,
nor what compiles csrc/.
"""

import functools
import importlib
import os
import shutil

import torch

from kernels import torch_ops
from kernels.ops import Ops


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


def triton_unavailable_reason() -> str | None:
    """Why this machine cannot compile Triton kernels; None if it can."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"needs the package triton, which cannot be imported ({error})"
    if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler at run time, and there is none (CC, cc, gcc or clang)"
    return None


def fp8_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this process does not compute with weights in block-fp8 on the device; None if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "needs a GPU that multiplies fp8 numbers as Hopper does"
    if dtype != torch.bfloat16:
        return "needs --dtype bfloat16"
    return triton_unavailable_reason()
