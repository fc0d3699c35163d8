"""A thread per decode node, so that a slow one delays only its own requests. Pings, without which it posts nothing."""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from control.messages import Destination, Peer
from control.plane import ControlPlane
from prefill_node.orders import TransferBlock, TransferReport
from transfer.transports import NoRoute
from transfer.writer import Channel, Pipeline

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
"""Without an answered ping for this long, nothing is posted to a decode node: its address may be another process's."""
_LOOK_S = 0.02


@dataclass(eq=False)
class LaneWork:
    """A block that is sent or read. report: called once, on any thread, when all of it has ended, or never will."""

    block: TransferBlock
    report: Callable[[TransferReport], None]
    is_cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Post nothing more of it. Any thread may call it."""
        self.is_cancelled = True


WorkT = TypeVar("WorkT", bound=LaneWork)
BuffersT = TypeVar("BuffersT")


class Lanes(ABC, Generic[WorkT, BuffersT]):
    """The lanes of one kind, by boot id. One loop calls it. A thread ends only when it is told to.

    kept: pipelines and buffers that transfers of unknown end may use until the process ends. always_lends: all work
    uses the buffers, so a lane has them before it posts anything.
    """

    always_lends = False

    def __init__(
        self,
        kind: str,
        connect: Callable[[Destination], Channel],
        silence: Callable[[Peer], float],
        lend: Callable[[], BuffersT],
        take_back: Callable[[BuffersT], None],
    ) -> None:
        """kind: names the threads. connect: the best way to a decode node's pool; raises NoRoute. silence: for how many
        seconds a decode node may have been dead (`ControlPlane.silence`). lend: buffers of one lane, at the first use.
        """
        self.kind = kind
        self.connect = connect
        self.silence = silence
        self.lend = lend
        self.take_back = take_back
        self.kept: list[object] = []
        self._lanes: dict[str, Lane[WorkT, BuffersT]] = {}

    @abstractmethod
    def connected(self, decode: Peer, channel: Channel) -> None:
        """Log a new way to a decode node's pool."""

    @abstractmethod
    def post(self, lane: "Lane[WorkT, BuffersT]", pipeline: Pipeline, work: WorkT) -> None:
        """Post what work asks for, on the thread of its lane. It may end later."""

    def submit(self, work: WorkT) -> None:
        """Queue work after what was submitted for the same decode node."""
        decode = work.block.decode
        if decode.boot_id not in self._lanes:
            lane = self._lanes[decode.boot_id] = Lane(self, decode)
            lane.thread.start()
        self._lanes[decode.boot_id].works.put(work)

    def keep_only(self, boot_ids: set[str]) -> None:
        """End the threads of other decode nodes once their queues are empty."""
        for boot_id in self._lanes.keys() - boot_ids:
            self._lanes.pop(boot_id).works.put(None)

    def stop(self, timeout: float) -> bool:
        """End all threads once their queues are empty. Whether they ended in time."""
        threads = [lane.thread for lane in self._lanes.values()]
        self.keep_only(set())
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class Lane(Generic[WorkT, BuffersT]):
    """What the thread of one decode node does. Whatever fails costs the work concerned, which is reported once."""

    def __init__(self, lanes: Lanes[WorkT, BuffersT], decode: Peer) -> None:
        self.works: queue.SimpleQueue[WorkT | None] = queue.SimpleQueue()
        """None: the thread ends."""
        self.thread = threading.Thread(target=self._run, name=f"{lanes.kind}-{decode.address}", daemon=True)
        self._lanes = lanes
        self._decode = decode
        self._pipeline: Pipeline | None = None
        self._buffers: BuffersT | None = None
        self._unreported: dict[int, WorkT] = {}
        """Work that was taken and not reported, by its number."""

    def lent(self) -> BuffersT:
        if self._buffers is None:
            self._buffers = self._lanes.lend()
        return self._buffers

    def may_post(self, work: WorkT, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait while the decode node may be dead, or work is not ready. Whether it is still wanted then."""
        while not work.is_cancelled:
            if self._lanes.silence(self._decode) < LEASE_S and is_ready():
                return True
            time.sleep(_LOOK_S)
        return False

    def report(self, report: TransferReport) -> None:
        """The one place that reports work: each once."""
        if (work := self._unreported.pop(report.work, None)) is not None:
            work.report(report)

    def keep(self) -> tuple[Pipeline | None, BuffersT | None]:
        """Use the pipeline and the buffers no more. They stay as they are: something in flight may use them."""
        used = self._pipeline, self._buffers
        self._pipeline = self._buffers = None
        self._lanes.kept.append(used)
        return used

    def _run(self) -> None:
        while True:
            try:
                if (work := self._next()) is None:
                    break
                self._serve(work)
            except Exception as error:
                self._give_up(error)
        try:
            self._close()
        except Exception as error:
            self._give_up(error)

    def _next(self) -> WorkT | None:
        """The next work. While there is none, wait for what is in flight to end."""
        while True:
            try:
                return self.works.get_nowait()
            except queue.Empty:
                if self._pipeline is None or self._pipeline.is_empty:
                    return self.works.get()
                self._pipeline.settle_oldest()

    def _serve(self, work: WorkT) -> None:
        number, fields = work.block.work, work.block.attempt.log_fields
        self._unreported[number] = work
        if work.is_cancelled:
            self.report(TransferReport(number, error="aborted"))
            return
        try:
            pipeline = self._connected(work.block.destination)
        except NoRoute as error:
            log.warning("no route", error=str(error), **fields)
            self.report(TransferReport(number, error=str(error)))
        except Exception as error:
            log.exception("connecting failed", decode=self._decode.address, **fields)
            self.report(TransferReport(number, error=f"connecting failed: {error}"))
        else:
            self._lanes.post(self, pipeline, work)

    def _connected(self, destination: Destination) -> Pipeline:
        if self._pipeline is not None and self._pipeline.lost_track:
            # Its buffers and its channel stay in use for ever: later work gets new ones.
            self._close()
        if self._pipeline is None:
            channel = self._lanes.connect(destination)
            self._pipeline = Pipeline(channel)
            self._lanes.connected(self._decode, channel)
        if self._lanes.always_lends:
            self.lent()
        return self._pipeline

    def _close(self) -> None:
        """Wait for all that was posted to end, and give back what it used."""
        # Kept alive, whatever fails meanwhile, until it is known that nothing uses it.
        pipeline, buffers = used = self.keep()
        if pipeline is not None:
            pipeline.drain()
            if pipeline.lost_track:
                return
        self._lanes.kept.remove(used)
        if buffers is not None:
            self._lanes.take_back(buffers)
        if pipeline is not None:
            pipeline.channel.close()

    def _give_up(self, error: Exception) -> None:
        """After a bug: nobody knows what is in flight of the work that was not reported."""
        log.exception("a transfer failed", decode=self._decode.address, works=len(self._unreported))
        for work in list(self._unreported):
            self.report(TransferReport(work, error=f"transfer failed: {error}", in_flight=True))
