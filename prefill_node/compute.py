"""Computes on a thread of its own, so that the node's loop takes messages while a chunk computes."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from engine.device import DeviceFailed, check_device
from prefill_node.orders import StepEnded
from ranks.group import Ranks

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Task:
    """A step of the group. what: it is called in errors. run: queues it on the device, and finds what is to be reported
    when it has ended, but for waiting. on_failure: called after the failure was reported."""

    number: int
    what: str
    run: Callable[[], Callable[[], StepEnded]]
    on_failure: Callable[[], None] = lambda: None


class ComputeThread:
    """Does one task at a time. `report` is called on this thread when one has ended."""

    def __init__(self, device: torch.device, ranks: Ranks, report: Callable[[StepEnded], None]) -> None:
        self.tasks_ended = 0
        self._device = device
        self._ranks = ranks
        self._report = report
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def start(self, task: Task) -> None:
        """Do a task after those before it."""
        self._tasks.put(task)

    def stop(self, timeout: float) -> bool:
        """End once the task that is under way has ended. Whether it has in time."""
        self._tasks.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            self._ranks.begin_step()
            ended = self._done(task)
            self._ranks.end_step()
            self.tasks_ended += 1
            self._report(ended)
            # Reported before its chunks fail, so that the node names the cause.
            if ended.error is not None:
                task.on_failure()

    def _done(self, task: Task) -> StepEnded:
        try:
            found = task.run()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            return found()
        except Exception as error:
            # A batch that cannot be computed (out of memory, say) costs only its requests.
            log.exception("step failed", what=task.what)
            return StepEnded(task.number, f"{task.what} failed: {error}", self._device_failure())

    def _device_failure(self) -> DeviceFailed | None:
        try:
            check_device(self._device)
        except DeviceFailed as failure:
            return failure
        return None
