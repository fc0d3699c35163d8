"""Tells a forward pass which layers of a prefix have been fetched: the pass waits for each before it attends to it."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

_LEAST_PATIENCE_S = 0.25


class NothingLeft(Exception):
    """No prefix that the pass needs will come in time: its result would not count."""


class PrefixArrival:
    """The layers of one prefix that is fetched, in their order.

    The fetching thread reports each layer once its bytes are in the pool and match their digests, but for the last
    one: that one the loop reports (`end`) when the fetch has ended and nothing of it lands any more. So a pass that
    has waited for all layers had nothing but verified bytes, and the loop knew that before the pass was over. Whoever
    finds first that it takes too long, or has failed, gives up; from then on no layer counts.
    """

    def __init__(self, layer_of_buffer: tuple[int, ...], wake: Callable[[], None] = lambda: None) -> None:
        """layer_of_buffer: as in KVLayout. wake: called when a layer has come, on the fetching thread."""
        self.layer_of_buffer = layer_of_buffer
        self.num_layers = max(layer_of_buffer) + 1
        self._wake = wake
        self._changed = threading.Condition()
        """Guards what follows."""
        self._layers = 0
        self._began_at = self._came_at = 0.0
        self._given_up = False

    @property
    def buffers_in_order(self) -> list[int]:
        """As they have to be read: the buffers of a layer one after another, the first layer's first."""
        return sorted(range(len(self.layer_of_buffer)), key=lambda buffer: self.layer_of_buffer[buffer])

    def begin(self) -> None:
        """The first read is about to be posted."""
        with self._changed:
            self._began_at = time.monotonic()

    def layers_came(self, layers: int) -> None:
        """The first `layers` layers are here and verified."""
        with self._changed:
            self._layers = min(layers, self.num_layers - 1)
            self._came_at = time.monotonic()
            self._changed.notify_all()
        self._wake()

    def end(self) -> bool:
        """All layers are here, and nothing lands any more. False, and no pass may use it, if it was given up before."""
        with self._changed:
            if not self._given_up:
                self._layers = self.num_layers
                self._changed.notify_all()
            return not self._given_up

    def give_up(self) -> None:
        """No pass is to wait any more. Changes nothing after `end`."""
        with self._changed:
            self._given_up = self._layers < self.num_layers
            self._changed.notify_all()

    def keeps_ahead_of(self, pass_seconds: float) -> bool:
        """Whether each layer will be here before a pass needs it that begins now and computes for so long.

        It is supposed that layers go on coming as fast as they have come so far, and take equally long to compute.
        False before the first has come.
        """
        with self._changed:
            if self._given_up or not self._layers:
                return False
            # The next one may be late already.
            so_far = (time.monotonic() - self._began_at) / (self._layers + 1)
            each = max((self._came_at - self._began_at) / self._layers, so_far)
            left = (self.num_layers - self._layers) * each
        # If the last one is in time, so are those before it: the first is here.
        return left <= pass_seconds * (self.num_layers - 1) / self.num_layers

    def wait(self, layer: int, patience: float) -> bool:
        """Whether a layer is here; waits for so many seconds, and gives up then."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or layer < self._layers, patience)
            if layer >= self._layers:
                self._given_up = True
            return not self._given_up


def pass_patience(pass_seconds: float) -> float:
    """How long a pass may wait, all in all, if it is expected to compute for so long.

    A host that queues work for a device is ahead of it, so it waits for a layer though the device does not.
    """
    return pass_seconds + _LEAST_PATIENCE_S


JobT = TypeVar("JobT")


class AwaitedPrefixes(Generic[JobT]):
    """The prefixes that one forward pass needs, by job. The computing thread uses it.

    void: jobs whose prefix did not come in time. What the pass computes of them does not count.
    """

    def __init__(self, arrivals: Mapping[JobT, PrefixArrival], num_jobs: int, patience: float) -> None:
        """num_jobs: of the pass. patience: seconds that the pass may wait, for all of them together."""
        self.void: set[JobT] = set()
        self._arrivals = dict(arrivals)
        self._num_jobs = num_jobs
        self._patience = patience

    def wait(self, layer: int) -> None:
        """Return when the pass may read this layer. Raises NothingLeft if all of its jobs are void."""
        for job, arrival in list(self._arrivals.items()):
            started = time.monotonic()
            if not arrival.wait(layer, self._patience):
                self.void.add(job)
                del self._arrivals[job]
            self._patience = max(0.0, self._patience - (time.monotonic() - started))
        if len(self.void) == self._num_jobs:
            raise NothingLeft
