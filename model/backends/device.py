"""What the shapes of a kernel's launch depend on."""

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
