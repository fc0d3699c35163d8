"""What a device can compute with: Triton kernels or not, and what the shapes of their launches depend on."""

import functools
import importlib
import os
import shutil

import torch


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
    """Whether a chain of small operations on the tensor is one kernel of ours, rather than several of torch's.

    In bfloat16 on a CUDA device. float32 is for reproducing the reference, operation by operation.
    """
    return tensor.is_cuda and tensor.dtype == torch.bfloat16 and has_triton()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
