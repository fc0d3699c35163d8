"""Kernels that are on the multiprocessors when the kernel before them ends, instead of being launched then.

By programmatic dependent launch (CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"): once
all programs of a kernel have begun, those of the next one come to the multiprocessors as far as there is room, and wait
there until it has ended and what it wrote is seen. A decode step has some two thousand kernels, most of a few
microseconds.

A kernel that is launched with `chained` calls `follow` before it writes anything, or reads what the kernel directly
before may have written. It comes only when that one has called `follow`, and so when all others had ended: the order of
kernels stays that of the stream, whichever are chained. Most call it first of all. `csrc/score_pages.cu` reads lengths
and page table before; weights that were asked for as early saved nothing.
"""

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def chained(device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel's launch on this device: the parameter `chained`, and Triton's option for it."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"chained": can, "launch_pdl": can}


@triton.jit  # type: ignore[untyped-decorator]
def follow(chained: tl.constexpr) -> None:
    """Wait for the kernel before, and let the one behind come."""
    if chained:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
