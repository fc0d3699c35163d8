"""Computes on a thread of its own, so that the node's loop takes messages while a chunk computes."""

import queue
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch

from control.prompt_logprobs import PromptLogprobs
from engine.chunked import ChunkedPrefill, PrefillStep
from engine.device import DeviceFailed, check_device
from engine.prompt_logprobs import QueuedLogprobs
from prefill_node.arrival import AwaitedPrefixes, NothingLeft
from prefill_node.job import TransferJob
from prefill_node.progress import ForwardProgress

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Computed:
    """A step has ended, or failed with an error. device_failed: the device does not work any more.

    prompt_logprobs: those of the jobs that ask for them, of the step's chunks. void: jobs whose chunks are worth
    nothing, since the prefix before them did not come.
    """

    step: PrefillStep[TransferJob]
    error: str | None = None
    device_failed: DeviceFailed | None = None
    prompt_logprobs: dict[TransferJob, PromptLogprobs] = field(default_factory=dict)
    void: Set[TransferJob] = frozenset()


class StepCompute(Protocol):
    """Computes one step at a time, on other threads."""

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        """Compute a step. The progress says which layers may be sent."""
        ...

    def stop(self, timeout: float) -> bool:
        """End once the step that is under way has ended. Whether it has in time."""
        ...


@dataclass(frozen=True)
class _Started:
    step: PrefillStep[TransferJob]
    progress: ForwardProgress
    awaited: AwaitedPrefixes[TransferJob]


class ComputeThread:
    """Computes one step at a time. `report` is called on this thread when a step has ended."""

    def __init__(
        self, prefill: ChunkedPrefill[TransferJob], device: torch.device, report: Callable[[Computed], None]
    ) -> None:
        self._prefill = prefill
        self._device = device
        self._report = report
        self._steps: queue.SimpleQueue[_Started | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        """Compute a step. The progress says which layers may be sent."""
        arriving = {job: job.arriving for job, _ in step.chunks if job.arriving is not None}
        patience = max((prefix.patience for prefix in arriving.values()), default=0.0)
        awaited = AwaitedPrefixes({job: prefix.arrival for job, prefix in arriving.items()}, len(step.chunks), patience)
        started = _Started(step, ForwardProgress(self._device), awaited)
        self._steps.put(started)
        return started.progress

    def stop(self, timeout: float) -> bool:
        """End once the step that is under way has ended. Whether it has in time."""
        self._steps.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (started := self._steps.get()) is not None:
            step, progress, awaited = started.step, started.progress, started.awaited
            try:
                queued = self._queue(started)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                logprobs = {job: found.wait() for job, found in queued.items()}
            except Exception as error:
                # A batch that cannot be computed (out of memory, say) costs only its requests.
                log.exception("prefill step failed")
                # Reported before its chunks fail, so that the node names the cause.
                self._report(Computed(step, f"prefill failed: {error}", self._device_failure()))
                progress.fail()
            else:
                self._report(Computed(step, prompt_logprobs=logprobs, void=awaited.void))

    def _queue(self, started: "_Started") -> dict[TransferJob, QueuedLogprobs]:
        """Queue a step. The host waits for fetched layers before it queues what reads them."""

        def on_layer(layer: int) -> None:
            started.progress.layer_done(layer)
            started.awaited.wait(layer)

        try:
            return self._prefill.compute(started.step, on_layer)
        except NothingLeft:
            started.progress.fail()
            return {}

    def _device_failure(self) -> DeviceFailed | None:
        try:
            check_device(self._device)
        except DeviceFailed as failure:
            return failure
        return None
