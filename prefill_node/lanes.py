"""A thread per decode node, so that a slow one delays only its own requests. Pings, without which it posts nothing."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import structlog

from control.messages import Destination, Peer
from control.plane import ControlPlane
from prefill_node.orders import TransferBlock, TransferReport
from transfer.transports import NoRoute

log = structlog.get_logger(__name__)

_WATCHED_FOR_S = 60.0
_SILENT_AFTER_S = 10.0


class DecodeNodes:
    """Pings the decode nodes that have attempts here: nothing is posted to one that does not answer. One loop calls it.

    Pings go on for a while afterwards, so that the next attempt need not wait for an answer.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._served_at: dict[Peer, float] = {}
        """When each last had an attempt here (time.monotonic)."""

    def watch(self, served: Iterable[Peer]) -> None:
        """These decode nodes have attempts here."""
        now = time.monotonic()
        self._served_at |= dict.fromkeys(served, now)
        self._served_at = {decode: at for decode, at in self._served_at.items() if now - at < _WATCHED_FOR_S}
        self._control.watch(self._served_at)

    def is_silent(self, decode: Peer, now: float) -> bool:
        """Whether the decode node was silent for so long that it will not ask for its attempts any more."""
        return now - (self._control.last_heard(decode.boot_id) or 0.0) > _SILENT_AFTER_S


LEASE_S = 2.0
"""Nothing is posted to a decode node after so long without an answered ping: its address may be another process's."""
_LOOK_S = 0.02


@dataclass(frozen=True, eq=False)
class LaneWork:
    """A block that is sent or read. is_wanted: asked again and again. report: called once, on any thread, when all has
    ended as far as can be known."""

    block: TransferBlock
    is_wanted: Callable[[], bool]
    report: Callable[[TransferReport], None]


WorkT = TypeVar("WorkT", bound=LaneWork)


class Lane(Generic[WorkT]):
    """What the thread of one decode node does. Whatever fails costs the work concerned, which is reported once."""

    def __init__(self, decode: Peer, silence: Callable[[Peer], float]) -> None:
        """silence: for how many seconds a decode node may have been dead (`ControlPlane.silence`)."""
        self._decode = decode
        self._silence = partial(silence, decode)
        self._unreported: dict[int, WorkT] = {}
        """What was taken, by its number."""

    def serve(self, work: WorkT) -> None:
        """Post what work asks for. It may end later."""
        number, fields = work.block.work, work.block.attempt.log_fields
        self._unreported[number] = work
        if not work.is_wanted():
            self._report(TransferReport(number, error="aborted"))
            return
        try:
            self._connect(work.block.destination)
        except NoRoute as error:
            log.warning("no route", error=str(error), **fields)
            self._report(TransferReport(number, error=str(error)))
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **fields)
            self._report(TransferReport(number, error=f"connecting failed: {error}"))
        else:
            self._post(work)

    def settle(self) -> bool:
        """Wait for some of what was posted to end. False if nothing is in flight."""
        return False

    def close(self) -> None:
        """Wait for all that was posted to end, and give back what it used."""
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """After a bug: nobody knows what is in flight of the work that was not reported."""
        log.exception("a transfer failed", decode=self._decode.address, works=len(self._unreported))
        for work in list(self._unreported):
            self._report(TransferReport(work, error=f"transfer failed: {error}", in_flight=True))

    def _connect(self, destination: Destination) -> None:
        """Have a way to the decode node's pool. Raises NoRoute."""
        raise NotImplementedError

    def _post(self, work: WorkT) -> None:
        raise NotImplementedError

    def _may_post(self, work: WorkT, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait while the decode node may be dead, or work is not ready. Whether it is still wanted then."""
        while work.is_wanted():
            if self._silence() < LEASE_S and is_ready():
                return True
            time.sleep(_LOOK_S)
        return False

    def _report(self, report: TransferReport) -> None:
        """The one place that reports work: each once."""
        if (work := self._unreported.pop(report.work, None)) is not None:
            work.report(report)


class Lanes(Generic[WorkT]):
    """The lanes of one kind, by boot id. One loop calls it. A thread ends only when it is told to."""

    def __init__(self, kind: str, new_lane: Callable[[Peer], Lane[WorkT]]) -> None:
        """kind: names the threads."""
        self._kind = kind
        self._new_lane = new_lane
        self._lanes: dict[str, tuple[queue.SimpleQueue[WorkT | None], threading.Thread]] = {}

    def submit(self, work: WorkT) -> None:
        """Queue work after what was submitted for the same decode node."""
        decode = work.block.decode
        if decode.boot_id not in self._lanes:
            works: queue.SimpleQueue[WorkT | None] = queue.SimpleQueue()
            name, run = f"{self._kind}-{decode.address}", partial(_run, self._new_lane(decode), works)
            self._lanes[decode.boot_id] = works, threading.Thread(target=run, name=name, daemon=True)
            self._lanes[decode.boot_id][1].start()
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
