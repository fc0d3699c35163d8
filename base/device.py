"""A device's streams, copies to and from it that do not wait, and a check whether it still works."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from base.errors import ProcessFailed

_POLL_S = 20e-6


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


class SideStream:
    """A stream for work that may run at the same time as what is queued on the current stream. On a CPU there is none:
    work runs in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Queue what is called inside here, after what the current stream was given before.

        The caller holds the tensors that are read until `join`. Memory of tensors made here is only used again by a
        later fork, which begins after all that uses them.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._forked = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Have the current stream wait for what was queued here since the last `join`.

        If nothing was, there is no wait: in a recorded step each one costs some of the overlap of kernels.
        """
        if self._stream is not None and self._forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._forked = False


def upload(values: Sequence[int] | npt.NDArray[Any], into: torch.Tensor) -> torch.Tensor:
    """Copy values to a tensor on a device, in the order of its work, without waiting. Returns the tensor."""
    tensor = torch.as_tensor(values)
    if into.is_cuda:  # a copy from memory that is not pinned waits until the device has come to it
        tensor = tensor.pin_memory()
    return into.copy_(tensor, non_blocking=True)


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

    def poll(self) -> torch.Tensor:
        """`wait`, for a thread that the device is waiting for: on a virtual machine, sleepers wake up 0.5 ms late."""
        while self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            time.sleep(_POLL_S)
        return self._copy
