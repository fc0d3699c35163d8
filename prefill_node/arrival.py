"""Tells a forward pass which layers of a prefix have been read: the pass waits for each before it attends to it."""

import threading
import time
from collections.abc import Callable, Mapping

from prefill_node.orders import LayersRead

_LEAST_PATIENCE_S = 0.25


class AllJobsVoid(Exception):
    """No prefix that the pass needs will come in time: its result would not count."""


class PrefixArrival:
    """The layers of one prefix that is read, in their order.

    The reading thread sets each layer ready once its bytes are in the pool and match their digests, but for the last
    layer: that one is ready at the `end`, when nothing lands any more and that was reported. So a pass that has waited
    for all layers had nothing but verified bytes, and the planner hears of that before it hears of the end of the pass.
    The reading thread gives up if the read fails, and a pass if it takes too long. From then on no layer counts.
    """

    def __init__(
        self, layer_of_buffer: tuple[int, ...], work: int = 0, report: Callable[[LayersRead], None] | None = None
    ) -> None:
        """layer_of_buffer: as in KVLayout. work, report: the number under which ready layers are reported, if they
        are, on the reading thread."""
        self.layer_of_buffer = layer_of_buffer
        self.num_layers = max(layer_of_buffer) + 1
        self._work = work
        self._report = report
        self._began_at = 0.0
        self._changed = threading.Condition()
        """Guards what follows."""
        self._layers = 0
        self._given_up = False

    def begin(self) -> None:
        """The first read is about to be posted."""
        self._began_at = time.monotonic()

    def set_layers_ready(self, layers: int) -> None:
        """The first `layers` layers are here and verified."""
        with self._changed:
            self._layers = min(layers, self.num_layers - 1)
            self._changed.notify_all()
        if self._report is not None and self._layers:
            self._report(LayersRead(self._work, self._layers, self._began_at, time.monotonic()))

    def end(self, report: Callable[[bool], None] = lambda _: None) -> None:
        """Nothing lands any more, and all layers are here, unless it was given up before: then no pass may use it.

        report: is told whether a pass may use it, before any goes on.
        """
        with self._changed:
            report(not self._given_up)
            if not self._given_up:
                self._layers = self.num_layers
                self._changed.notify_all()

    def give_up(self) -> None:
        """No pass is to wait any more. Changes nothing after `end`."""
        with self._changed:
            self._given_up = self._layers < self.num_layers
            self._changed.notify_all()

    def wait(self, layer: int, patience: float) -> bool:
        """Whether a layer is here. Waits `patience` seconds for it, then gives up."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or layer < self._layers, patience)
            if layer >= self._layers:
                self._given_up = True
            return not self._given_up


def arrives_in_time(read: LayersRead, num_layers: int, pass_seconds: float, now: float) -> bool:
    """Whether each layer arrives before a pass needs it. pass_seconds: of computing; the pass begins now.

    It is supposed that layers go on coming as fast as they have come so far, and take equally long to compute.
    """
    # The next one may be late already.
    so_far = (now - read.began_at) / (read.layers + 1)
    each = max((read.at - read.began_at) / read.layers, so_far)
    # If the last one is in time, so are those before it: the first is here.
    return (num_layers - read.layers) * each <= pass_seconds * (num_layers - 1) / num_layers


def pass_patience(pass_seconds: float) -> float:
    """How long a pass may wait in all. pass_seconds: of computing, as expected.

    A host that queues work for a device is ahead of it, so it waits for a layer though the device does not.
    """
    return pass_seconds + _LEAST_PATIENCE_S


class AwaitedPrefixes:
    """The prefixes that one forward pass needs, by the number of the chunk. The computing thread uses it.

    void: chunks whose prefix did not come in time. What the pass computes of them does not count.
    """

    def __init__(self, arrivals: Mapping[int, PrefixArrival], num_chunks: int, patience: float) -> None:
        """num_chunks: of the pass. patience: seconds that the pass may wait, for all of them together."""
        self.void: set[int] = set()
        self._arrivals = dict(arrivals)
        self._num_chunks = num_chunks
        self._patience = patience

    def wait(self, layer: int) -> None:
        """Return when the pass may read this layer. Raises AllJobsVoid if all of its chunks are void."""
        for chunk, arrival in list(self._arrivals.items()):
            started = time.monotonic()
            if not arrival.wait(layer, self._patience):
                self.void.add(chunk)
                del self._arrivals[chunk]
            self._patience = max(0.0, self._patience - (time.monotonic() - started))
        if len(self.void) == self._num_chunks:
            raise AllJobsVoid
