"""The decode node's loop: receive, take a turn, stream."""

import time

import structlog

from control.membership import Membership
from control.messages import (
    Accepted,
    Cancel,
    ChunkDone,
    Ended,
    Generate,
    HeartbeatAck,
    Message,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Progress,
    Quiesced,
    Refused,
    Registered,
    Resend,
)
from decode_node.loop_call import LoopCall
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import RequestState
from decode_node.scheduler import Scheduler
from decode_node.verifier import Verified
from engine.device import DeviceFailed
from hisparse.coordinator import HiSparseCoordinator
from hisparse.swap_in import SwapInCounters
from service.lifecycle import Phase
from service.shell import NodeShell

log = structlog.get_logger(__name__)

_IDLE_WAIT_S = 0.1
_BUSY_PREFILL_WAIT_S = 0.02
_GATEWAY_SILENCE_S = 30.0
_FAREWELL_S = 0.5
"""How long a node that has nothing left still says so: gateways may have sent requests before they heard of it."""

Event = Verified | LoopCall
"""What other threads of this process put into the loop's inbox."""


class DecodeNode:
    """Brings messages to the scheduler and the remote prefills, and gives both their turns."""

    def __init__(
        self,
        shell: NodeShell[Event],
        scheduler: Scheduler,
        remote: RemotePrefill,
        coordinator: HiSparseCoordinator,
        membership: Membership,
    ) -> None:
        self._shell = shell
        self._control = shell.control
        self._metrics = shell.metrics
        self._scheduler = scheduler
        self._remote = remote
        self._coordinator = coordinator
        self._membership = membership
        self._exported = SwapInCounters(0, 0, 0, 0)
        """What /metrics was told of swap-in; of the thread that refreshes it."""
        self._violations = 0
        """How many swap-in violations the loop knows of."""
        self._housekeeping_at = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Serve until told to stop; finish what streams and hand over the rest; end what is left.

        Raises DeviceFailed, once every client has its error, if the device does not work any more.
        """
        try:
            self._run()
        except DeviceFailed as failure:
            self._shell.leave()
            self._scheduler.fail_all(str(failure))
            raise

    def _run(self) -> None:
        lifecycle = self._shell.lifecycle
        while lifecycle.phase is Phase.SERVING:
            self._turn()
        self._shell.leave()
        farewell_until = time.monotonic() + _FAREWELL_S
        self._scheduler.hand_over("the decode node is stopping")
        while lifecycle.phase is Phase.DRAINING and (self._holds_something or time.monotonic() < farewell_until):
            self._turn()
        self._scheduler.end_all("the decode node is stopping")

    def _turn(self) -> None:
        for item in self._shell.receive(self._patience()):
            self._take(item)
        now = time.monotonic()
        self._scheduler.apply(self._remote.tick(now))
        self._housekeep(now)
        self._scheduler.turn()
        self._check_idle()

    @property
    def _holds_something(self) -> bool:
        """Requests, or slots that a live prefill node may be writing to: its writes would fail if they went."""
        return bool(self._scheduler.requests) or self._remote.written_to

    def refresh_metrics(self) -> None:
        """Bring the gauges and counters up to date for a scrape. One thread calls it, which need not be the loop's."""
        host, device, metrics = self._coordinator.host, self._coordinator.device, self._metrics
        quarantined = self._remote.quarantined_slots
        metrics.host_slots.labels("free").set(host.free)
        metrics.host_slots.labels("quarantined").set(quarantined)
        metrics.host_slots.labels("used").set(host.used - quarantined)
        metrics.quarantine_seconds.set(self._remote.quarantine_seconds(time.monotonic()))
        metrics.kv_tokens_outstanding.set(self._scheduler.outstanding_tokens)
        metrics.device_slots.labels("free").set(device.free_slots)
        metrics.device_slots.labels("used").set(device.used_slots)
        states = [request.state for request in list(self._scheduler.requests.values())]
        for state in RequestState:
            if state is not RequestState.FINISHED:
                metrics.requests.labels(state.value).set(states.count(state))
        now, before = self._coordinator.counters(), self._exported
        metrics.swap_in_hits.inc(now.hits - before.hits)
        metrics.swap_in_misses.inc(now.misses - before.misses)
        metrics.swap_in_bytes.inc(now.bytes - before.bytes)
        metrics.swap_in_violations.inc(now.violations - before.violations)
        self._exported = now

    def _patience(self) -> float:
        """How long the loop may wait for a message before its next turn."""
        if self._scheduler.has_work:
            return 0.0
        return _BUSY_PREFILL_WAIT_S if self._scheduler.requests else _IDLE_WAIT_S

    def _take(self, item: tuple[Peer, Message] | Event) -> None:
        match item:
            case Verified():
                self._scheduler.apply(self._remote.verified(item))
            case LoopCall():
                item.run()
            case (sender, message):
                self._on_message(sender, message)

    def _on_message(self, sender: Peer, message: Message) -> None:
        match message:
            case Generate():
                if message.prefill_nodes:
                    self._remote.nodes.learn(sender.address, message.prefill_nodes, message.longest_prompts)
                rejected = self._scheduler.add(message, sender)
                self._control.send(sender, rejected or Accepted(request_id=message.request_id))
            case Cancel():
                self._scheduler.cancel(message.request_id, sender)
            case Ended():
                self._scheduler.ended(message.request_id, sender)
            case Resend():
                self._scheduler.resend(message.request_id, message.start, sender)
            case (
                PrefillAccepted() | ChunkDone() | PrefillDone() | PrefillFailed() | Quiesced() | NotHeld() | Progress()
            ):
                self._scheduler.apply(self._remote.take(sender, message))
            case HeartbeatAck():
                self._remote.nodes.learn(sender.address, message.prefill_nodes, message.longest_prompts)
                self._remote.nodes.retire(*message.leaving)
            case Registered() | Refused():
                pass
            case _:
                log.warning("not for a decode node", kind=type(message).__name__, sender=sender.address)

    def _housekeep(self, now: float) -> None:
        """Once a second, end the requests whose tokens nobody would read, and those whose tokens may be wrong."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        self._end_unread(now)
        self._end_violated()

    def _end_unread(self, now: float) -> None:
        """End the requests of gateways that are gone."""
        for request in list(self._scheduler.requests.values()):
            if self._membership.gateway_lost(request.gateway, now, _GATEWAY_SILENCE_S):
                log.warning("gateway is gone", request_id=request.request_id, gateway=request.gateway.address)
                self._scheduler.end(request, "abort")

    def _end_violated(self) -> None:
        """If swap-in met violations since the last time, end what has decoded since then: nobody knows whose they were.

        Whoever is in a step in flight is a suspect now and the next time.
        """
        suspects = self._scheduler.take_stepped()
        violations = self._coordinator.counters().violations - self._violations
        if not violations:
            return
        self._violations += violations
        log.error("swap-in violations", violations=violations, ended=len(suspects))
        for request in suspects:
            self._scheduler.end(request, "error", f"its tokens may be wrong (swap-in violations: {violations})")

    def _check_idle(self) -> None:
        """When nothing is held any more, for a request or after one, see that nothing was left behind."""
        busy = self._scheduler.holds_something
        if self._was_busy and not busy:
            self._scheduler.check_idle()
        self._was_busy = busy
