"""A thread per decode node, so that a slow one delays only its own requests."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from control.messages import Peer

WorkT = TypeVar("WorkT")
WorkT_contra = TypeVar("WorkT_contra", contravariant=True)


class Lane(Protocol[WorkT_contra]):
    """What the thread of a decode node does. It reports all work that it has taken, each once."""

    def serve(self, work: WorkT_contra) -> None:
        """Post what work asks for. It may end later."""
        ...

    def settle(self) -> bool:
        """Wait for some of what was posted to end. False if nothing is in flight."""
        ...

    def close(self) -> None:
        """Wait for all that was posted to end, and give back what it used."""
        ...

    def give_up(self, error: Exception) -> None:
        """After a bug: nobody knows what is in flight of the work that was not reported."""
        ...


class Lanes(Generic[WorkT]):
    """The lanes of one kind, by boot id. One loop calls it.

    A thread ends only when it is told to: whatever fails costs the work concerned.
    """

    def __init__(self, kind: str, new_lane: Callable[[Peer], Lane[WorkT]]) -> None:
        """kind: names the threads."""
        self._kind = kind
        self._new_lane = new_lane
        self._lanes: dict[str, tuple[queue.SimpleQueue[WorkT | None], threading.Thread]] = {}

    def submit(self, decode: Peer, work: WorkT) -> None:
        """Queue work after what was submitted for the same decode node."""
        if decode.boot_id not in self._lanes:
            works: queue.SimpleQueue[WorkT | None] = queue.SimpleQueue()
            run = threading.Thread(
                target=_run, args=(self._new_lane(decode), works), name=f"{self._kind}-{decode.address}", daemon=True
            )
            self._lanes[decode.boot_id] = works, run
            run.start()
        self._lanes[decode.boot_id][0].put(work)

    def keep_only(self, boot_ids: set[str]) -> None:
        """End the threads of other decode nodes once their queues are empty."""
        for boot_id in self._lanes.keys() - boot_ids:
            self._lanes.pop(boot_id)[0].put(None)

    def stop(self, timeout: float) -> bool:
        """End all threads once their queues are empty. Whether they ended in time."""
        threads = [thread for _, thread in self._lanes.values()]
        self.keep_only(set())
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _run(lane: Lane[WorkT], works: "queue.SimpleQueue[WorkT | None]") -> None:
    while True:
        try:
            if (work := _next(lane, works)) is None:
                break
            lane.serve(work)
        except Exception as error:
            lane.give_up(error)
    try:
        lane.close()
    except Exception as error:
        lane.give_up(error)


def _next(lane: Lane[WorkT], works: "queue.SimpleQueue[WorkT | None]") -> WorkT | None:
    """The next work. While there is none, wait for what is in flight to end."""
    while True:
        try:
            return works.get_nowait()
        except queue.Empty:
            if not lane.settle():
                return works.get()
