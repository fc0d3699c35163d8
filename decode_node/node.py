"""The decode node's loop: receive messages, prefill, decode, stream."""

import time

import structlog
from prometheus_client import Counter, Gauge

from base.phase import Phase
from control.membership import Membership
from control.messages import (
    Accepted,
    Cancel,
    Ended,
    Generate,
    HeartbeatAck,
    Message,
    Peer,
    Refused,
    Registered,
    Resend,
)
from decode_node.quarantine import LoopCall
from decode_node.remote_prefill import PrefillMessage, RemotePrefill
from decode_node.request import RequestState
from decode_node.scheduler import Scheduler
from decode_node.verifier import ChecksumTask, Digesting, Verification
from hisparse.coordinator import HiSparseCoordinator
from hisparse.filling import FillEnd
from ranks.barrier import GroupFailed
from ranks.group import Ranks
from service.shell import NodeShell

log = structlog.get_logger(__name__)

_IDLE_WAIT_S = 0.1
_BUSY_PREFILL_WAIT_S = 0.02
_GATEWAY_SILENCE_S = 30.0
_FAREWELL_S = 0.5
"""How long an empty node still refuses requests before it ends: gateways may not know yet that it leaves."""

LoopEvent = ChecksumTask | LoopCall
"""What other threads put into the loop's inbox."""


class DecodeNode:
    """Takes messages to the scheduler and to the remote prefills, and gives each its turn."""

    def __init__(
        self,
        shell: NodeShell[LoopEvent],
        scheduler: Scheduler,
        remote: RemotePrefill,
        coordinator: HiSparseCoordinator,
        membership: Membership,
        ranks: Ranks,
    ) -> None:
        self._shell = shell
        self._scheduler = scheduler
        self._remote = remote
        self._coordinator = coordinator
        self._membership = membership
        self._ranks = ranks
        self._exported: dict[Counter, float] = {}
        """The counts that /metrics has; only the thread that refreshes metrics uses it."""
        self._violations = 0
        """Swap-in violations that the loop has handled."""
        self._housekeeping_at = 0.0
        self._was_busy = False

    def run(self) -> None:
        """Serve until told to stop; then finish what streams, hand over the rest, and end what is left.

        Raises DeviceFailed if the device does not work any more, GroupFailed if the group does not, and whatever else
        ends the loop, after the gateways were told to go elsewhere.
        """
        try:
            self._run()
        except Exception as failure:
            self._shell.leave()
            self._scheduler.end_streams(str(failure) or repr(failure))
            if isinstance(failure, GroupFailed):
                self._ranks.report(str(failure))
            raise

    def _run(self) -> None:
        lifecycle = self._shell.lifecycle
        while lifecycle.phase is Phase.SERVING:
            self._turn()
        self._shell.leave()
        farewell_until = time.monotonic() + _FAREWELL_S
        self._scheduler.hand_over()
        while lifecycle.phase is Phase.DRAINING and (self._must_stay or time.monotonic() < farewell_until):
            self._turn()
        self._scheduler.hand_over(streaming=True)
        # A rank ends with the others: they need its part of their steps.
        while not self._ranks.done():
            self._turn()

    def _turn(self) -> None:
        for item in self._shell.receive(self._patience()):
            self._take(item)
        now = time.monotonic()
        self._remote.tick(now)
        self._housekeep(now)
        self._scheduler.turn()
        busy = self._scheduler.holds_something
        if self._was_busy and not busy:
            # The last request has gone: look for leaked slots.
            self._scheduler.check_idle()
        self._was_busy = busy
        lifecycle = self._shell.lifecycle
        lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))

    @property
    def _must_stay(self) -> bool:
        """Whether there are requests, or slots that a live prefill node may be writing to: its writes would fail."""
        return bool(self._scheduler.requests) or self._remote.quarantine.written_to

    def refresh_metrics(self) -> None:
        """Update gauges and counters for a scrape. Always called by the same thread, which need not be the loop's."""
        host, device, metrics = self._coordinator.host, self._coordinator.device, self._shell.metrics
        quarantined = self._remote.quarantine.num_slots
        cached = host.cached
        metrics.host_slots.labels("free").set(host.free - cached)
        metrics.host_slots.labels("cached").set(cached)
        metrics.host_slots.labels("quarantined").set(quarantined)
        metrics.host_slots.labels("used").set(host.used - quarantined)
        metrics.kv_usage.set(host.usage)
        metrics.quarantine_seconds.set(self._remote.quarantine.oldest_seconds(time.monotonic()))
        metrics.kv_tokens_outstanding.set(self._scheduler.outstanding_tokens)
        metrics.device_slots.labels("free").set(device.free_slots)
        metrics.device_slots.labels("used").set(device.used_slots)
        residents = self._coordinator.residents
        _set_by_state(metrics.rows, device.used_rows, device.resident_rows, residents.filler.row is not None)
        _set_by_state(metrics.hot_slots, device.used_slots, device.resident_slots, device.loose_slots)
        states = [request.state for request in list(self._scheduler.requests.values())]
        for state in RequestState:
            if state is not RequestState.FINISHED:
                metrics.requests.labels(state.value).set(states.count(state))
        swapped = self._coordinator.counters()
        counts = {
            metrics.swap_in_hits: swapped.hits,
            metrics.swap_in_misses: swapped.misses,
            metrics.swap_in_bytes: swapped.bytes,
            metrics.swap_in_ahead_bytes: swapped.ahead_bytes,
            metrics.swap_in_ahead_wait: swapped.ahead_wait_s,
            metrics.swap_in_violations: swapped.violations,
            metrics.filled_bytes: residents.filler.copied_bytes,
            metrics.shrunk_rows: residents.shrunk,
            **{metrics.fills.labels(end.value): residents.filler.ends[end] for end in FillEnd},
        }
        for counter, count in counts.items():
            counter.inc(count - self._exported.get(counter, 0))
        self._exported = counts

    def _patience(self) -> float:
        """How long the loop may wait for a message before its next turn."""
        if self._scheduler.has_work:
            return 0.0
        if self._ranks.barrier.spin_before_sleep(lambda: not self._shell.inbox.empty()):
            return 0.0
        return _BUSY_PREFILL_WAIT_S if self._scheduler.requests else _IDLE_WAIT_S

    def _take(self, item: tuple[Peer, Message] | LoopEvent) -> None:
        match item:
            case Verification():
                self._remote.verified(item)
            case Digesting():
                self._remote.reads.digested(item)
            case LoopCall():
                item.run()
            case (sender, Generate() as message):
                if message.prefill_nodes:
                    self._learn(sender, message)
                for one in message.each():
                    rejected = self._scheduler.add(one, sender)
                    self._shell.control.send(sender, rejected or Accepted(request_id=one.request_id))
            case (sender, Cancel() as message):
                self._scheduler.cancel(message.request_id, sender)
            case (sender, Ended() as message):
                self._scheduler.outputs.ended(message.request_id, sender)
            case (sender, Resend() as message):
                self._scheduler.outputs.resend(message.request_id, message.start, sender)
            case (sender, HeartbeatAck() as message):
                self._learn(sender, message)
                self._remote.nodes.retire(*message.leaving)
                if not (message.prefill_nodes or message.leaving):
                    self._scheduler.give_back_stranded(sender)
            case (_, Registered() | Refused()):
                pass
            case (sender, message) if isinstance(message, PrefillMessage):
                self._remote.take(sender, message)
            case (sender, message):
                log.warning("not for a decode node", kind=type(message).__name__, sender=sender.address)

    def _learn(self, gateway: Peer, message: Generate | HeartbeatAck) -> None:
        self._remote.nodes.learn(gateway.address, message.prefill_nodes, message.longest_prompts, message.prefill_ranks)

    def _housekeep(self, now: float) -> None:
        """Once a second, end requests whose gateway is gone and requests whose tokens may be wrong."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        for request in list(self._scheduler.requests.values()):
            if self._membership.gateway_lost(request.gateway, now, _GATEWAY_SILENCE_S):
                log.warning("gateway is gone", request_id=request.request_id, gateway=request.gateway.address)
                self._scheduler.end(request, "abort")
        self._end_violated()

    def _end_violated(self) -> None:
        """If there were swap-in violations since the last look, end every request that was in a step since then.

        Nobody knows which of them had the violations. Requests in a step in flight are suspects the next time, too.
        """
        suspects = self._scheduler.take_stepped()
        violations = self._coordinator.counters().violations - self._violations
        if not violations:
            return
        self._violations += violations
        log.error("swap-in violations", violations=violations, ended=len(suspects))
        for request in suspects:
            self._scheduler.end(request, "error", f"its tokens may be wrong (swap-in violations: {violations})")
        # So may the KV of those that ended since the last look.
        if (prefixes := self._coordinator.host.prefixes) is not None:
            prefixes.clear()


def _set_by_state(gauge: Gauge, used: int, resident: int, filling: int) -> None:
    """What is neither resident nor being filled is in hot buffers. The loop may have gone on between the counts."""
    for state, count in (("resident", resident), ("filling", filling), ("buffered", used - resident - filling)):
        gauge.labels(state).set(max(0, count))
