"""Measuring on the device how long a stream waits for another, with csrc/wait_time.cu."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.launch import DeviceKernel
from kernels.specialization import Specialization, params_of

WaitTimeParams = params_of("wait_time.cu", "WaitTimeParams")


@dataclass(frozen=True)
class WaitTimeSpecialization(Specialization):
    """csrc/wait_time.cu."""

    entry = "wait_time"
    block_size: int = 32

    def constants(self) -> dict[str, int | str]:
        return {}


class WaitTimer:
    """Sums up how long torch's current stream waits. A wait may be captured in a CUDA graph, and counts at each replay.

    waited: int64 [] on the device, ns. A wait for nothing counts the launch between its ends, 1 or 2 us.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel = DeviceKernel(WaitTimeSpecialization(), device)
        self._began, self.waited = torch.zeros(2, dtype=torch.int64, device=device).unbind()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """What the stream is told to wait for within this context is measured."""
        self._launch(0)
        yield
        self._launch(self.waited.data_ptr())

    def _launch(self, waited: int) -> None:
        self._kernel.launch(WaitTimeParams(self._began.data_ptr(), waited), (1, 1, 1))
