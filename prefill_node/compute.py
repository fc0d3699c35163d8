"""Computes on a thread of its own, and tells the lanes which layers are done."""

import queue
import threading
from collections.abc import Callable
from typing import Self

import structlog
import torch

from base.device import DeviceFailed, check_device
from prefill_node.orders import StepEnded
from ranks.group import Ranks

log = structlog.get_logger(__name__)

_LOOK_UP_S = 0.05


class NotComputed(Exception):
    """The layer will not be computed, or the chunk is no longer wanted."""


class ForwardProgress:
    """One forward pass: the compute thread reports layers, lanes wait for them.

    A layer is done when its KV is in the pool *on the device*. With CUDA an event is recorded after the kernels that
    write it, and nothing is posted before that event: a NIC that read earlier would send old bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        """Guards _events and _failed."""
        self._events: list[torch.cuda.Event | None] = []
        self._failed = False

    @classmethod
    def over(cls, device: torch.device, num_layers: int) -> Self:
        """Of a forward pass for which somebody has waited to its end."""
        progress = cls(device)
        progress._events = [None] * num_layers
        return progress

    def layer_done(self, layer: int) -> None:
        """The kernels that write this layer's KV are queued. Called for every layer in order."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        with self._changed:
            assert layer == len(self._events)
            self._events.append(event)
            self._changed.notify_all()

    def fail(self) -> None:
        """The pass ended with an error: no more layers will come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def is_done(self, layer: int) -> bool:
        """Whether `wait` would return at once."""
        with self._changed:
            if len(self._events) <= layer:
                return False
            event = self._events[layer]
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def wait(self, layer: int, cancelled: Callable[[], bool]) -> None:
        """Return when the layer is done. Raises NotComputed."""
        with self._changed:
            while len(self._events) <= layer:
                if self._failed or cancelled():
                    raise NotComputed
                self._changed.wait(_LOOK_UP_S)
            event = self._events[layer]
        if event is not None:
            event.synchronize()


Run = Callable[[], Callable[[], StepEnded]]
"""Queues a step on the device, and finds what is to be reported when it has ended, but for waiting."""


class ComputeThread:
    """Computes one step at a time. `report` is called on this thread when one has ended."""

    def __init__(self, device: torch.device, ranks: Ranks, report: Callable[[StepEnded], None]) -> None:
        self.tasks_ended = 0
        self._device = device
        self._ranks = ranks
        self._report = report
        self._tasks: queue.SimpleQueue[tuple[int, str, Run, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def start(self, number: int, what: str, run: Run, on_failure: Callable[[], None] = lambda: None) -> None:
        """Compute a step after those before it. what: it is called in errors. on_failure: called after the failure was
        reported."""
        self._tasks.put((number, what, run, on_failure))

    def stop(self, timeout: float) -> bool:
        """End once the task that is under way has ended. Whether it has in time."""
        self._tasks.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            number, what, run, on_failure = task
            self._ranks.begin_step()
            ended = self._done(number, what, run)
            self._ranks.end_step()
            self.tasks_ended += 1
            self._report(ended)
            # Reported before its chunks fail, so that the node names the cause.
            if ended.error is not None:
                on_failure()

    def _done(self, number: int, what: str, run: Run) -> StepEnded:
        try:
            found = run()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            return found()
        except Exception as error:
            # A batch that cannot be computed (out of memory, say) costs only its requests.
            log.exception("step failed", what=what)
            return StepEnded(number, f"{what} failed: {error}", self._device_failure())

    def _device_failure(self) -> DeviceFailed | None:
        try:
            check_device(self._device)
        except DeviceFailed as failure:
            return failure
        return None
