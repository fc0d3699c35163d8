"""Copies from the device that do not wait, and a check whether the device still works."""

import torch

from base.errors import ProcessFailed


class DeviceFailed(ProcessFailed):
    """This process cannot use its device any more."""


def check_device(device: torch.device) -> None:
    """After an error: wait for what was queued on the device. Raises DeviceFailed if it does not work any more.

    After some errors (an illegal access) a CUDA context fails at everything; others (out of memory) end only the work
    that met them.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise DeviceFailed(f"{device} cannot be used any more: {first_line}") from error


class Download:
    """A copy of a tensor to the host, queued after the work that computes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            # The thread that waits sleeps, so that others of the process run meanwhile.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._copy = tensor

    def wait(self) -> torch.Tensor:
        """The copy, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
