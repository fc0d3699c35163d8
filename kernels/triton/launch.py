"""Launches of Triton kernels: on which device, in what tiles, and chained.

Chained launches are programmatic dependent launches (CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization"): once all programs of a kernel have begun, those of the next one come to the multiprocessors as far as
there is room, and wait there until it has ended and what it wrote is seen. A decode step has some two thousand kernels,
most of a few microseconds.

A kernel that is launched with `chained` calls `follow` before it writes anything, or reads what the kernel directly
before may have written. It comes only when that one has called `follow`, and so when all others had ended: the order of
kernels stays that of the stream, whichever are chained. Most call it first of all. `csrc/score_pages.cu` reads lengths
and page table before; weights that were asked for as early saved nothing.
"""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr

MIN_TILE = 16
"""The least that a tensor core takes in any direction."""


def tile_width(size: int) -> int:
    """The width of a tile that holds `size` elements."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


@functools.cache
def properties(device: torch.device) -> Any:
    """What CUDA says of a device."""
    return torch.cuda.get_device_properties(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on this device; on a CPU Triton's interpreter runs them (TRITON_INTERPRET=1)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def chained(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel's launch on this device: the parameter `chained`, and Triton's option for it."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"chained": can, "launch_pdl": can}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Launch a kernel with a parameter `chained`, if the grid has programs."""
    if 0 not in grid:
        with on(device):
            kernel[grid](*args, **options, **chained(device))


@triton.jit
def follow(chained: constexpr) -> None:
    """Wait for the kernel before, and let the next one come."""
    if chained:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
