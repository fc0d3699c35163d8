"""The CUDA device that most benchmarks need."""

import gc

import torch

from base.errors import StartupError


def need_cuda(what: str) -> torch.device:
    """The current device. what: the benchmark. Raises StartupError if there is none."""
    if not torch.cuda.is_available():
        raise StartupError(f"{what} needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def finish(device: torch.device) -> None:
    """Wait until a device has computed all that was queued; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory() -> None:
    """Of what was dropped: recorded steps and their coordinator refer to each other, and hold gigabytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
