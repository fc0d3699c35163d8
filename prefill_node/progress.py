"""Tells the lanes which layers a forward pass has computed."""

import threading
from collections.abc import Callable
from typing import Self

import torch

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
