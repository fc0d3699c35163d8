"""What prefill and decode nodes have around their loop: ports, inbox, status page, membership, stop signals."""

import gc
import queue
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Generic, TypeVar

import structlog
from fastapi import APIRouter

from base.errors import StartupError
from base.metrics import Metrics
from base.tracing import tracer_to
from control.discovery import GatewayAddresses
from control.keys import cache_seed, group_secret, load_keys
from control.membership import HEARTBEAT_S, CacheReports, Membership
from control.messages import HeartbeatAck, Message, Peer, Refused, Registered, Role
from control.plane import ControlPlane
from kvcache.block_cache import BlockCache
from service.config import NodeConfig, is_loopback
from service.kv_events import KVEventPublisher, parse_kv_events
from service.lifecycle import STOP_SIGNALS, Lifecycle
from service.status import StatusServer, bind_http, metrics_router, status_router
from transfer.ports import reachable_addresses
from transfer.transports import Transports

log = structlog.get_logger(__name__)

Event = TypeVar("Event")

MAX_WAITING = 10_000
"""Size of the inbox beyond which control messages are dropped: senders repeat those that must arrive."""
MOST_TAKEN = 256
"""Messages and events of one turn of the loop, so that a flood does not hold the steps of others."""


def closing_command(config: NodeConfig) -> str:
    """The command that keeps strangers from the transfer ports, where other machines are none of the service's."""
    if not is_loopback(config.data_host):
        return "nft -f deploy/nftables/hisparse-pd.nft, with its variables set (docs/operations/secure.md, Network)"
    rule = f"iifname != lo tcp dport {config.transfer_ports} reject"
    return f"nft 'table inet hisparse_pd {{ chain input {{ type filter hook input priority -10; {rule}; }}; }}'"


def _kv_events(role: Role, config: NodeConfig, rank: int) -> KVEventPublisher | None:
    """What publishes the events of this process's prefix cache, if it is to. Of a prefill node rank 0 has the cache."""
    events = parse_kv_events(config.kv_events_config, config.insecure)
    if events is None or (role == "prefill" and rank):
        return None
    return KVEventPublisher(events, "GPU" if role == "prefill" and config.device != "cpu" else "CPU", rank)


class NodeShell(Generic[Event]):
    """Everything of a node but its loop.

    inbox: control messages with their senders, the node's events, and None to wake the loop. Stop signals change
    `lifecycle` and wake the loop.
    """

    def __init__(self, role: Role, config: NodeConfig, rank: int = 0) -> None:
        """Binds the ports, before a model is loaded. Raises StartupError if one is taken or a key is missing."""
        self.metrics = Metrics()
        self.lifecycle = Lifecycle(config.drain_timeout)
        self.inbox: queue.SimpleQueue[tuple[Peer, Message] | Event | None] = queue.SimpleQueue()
        self._dropped = 0
        self._listener = bind_http(config.host, config.port)
        self._kv_events: KVEventPublisher | None = None
        try:
            self._kv_events = _kv_events(role, config, rank)
            keys = None if config.key_dir is None else load_keys(config.key_dir, role)
            self.cache_seed = cache_seed(keys)
            self.group_secret = group_secret(keys)
            address = f"{config.advertised_host}:{self._listener.getsockname()[1]}"
            self.tracer = tracer_to(config.otlp_traces_endpoint, role, address)
            self.control = ControlPlane(
                role,
                config.host,
                config.control_port,
                config.advertised_host,
                deliver=self._deliver,
                keys=keys,
            )
        except BaseException:
            # Whatever it was: the caller gets no shell that it could close.
            self._listener.close()
            if self._kv_events is not None:
                self._kv_events.close()
            raise
        self.gateways = GatewayAddresses(config.gateways)
        self._closing = closing_command(config)
        self._status: StatusServer | None = None
        self._membership: Membership | None = None
        self._cache_reports: CacheReports | None = None

    def start(
        self,
        membership: Membership | None,
        refresh: Callable[[], None],
        *routers: APIRouter,
        cached: BlockCache | None = None,
    ) -> None:
        """Answer status requests and messages from now on. Call on the main thread, which gets the stop signals.

        membership: None for a process that registers nowhere. refresh: updates gauges before a scrape. cached: the
        node's prefix cache, still empty, which is reported to gateways.
        """
        # Modules, weights and tables stay until the end. Collections that look at them again take 0.1 s.
        gc.collect()
        gc.freeze()
        self._membership = membership
        if self._kv_events is not None:
            self._kv_events.start()
            if cached is None:
                log.warning("no KV events: this node keeps no prefixes")
            else:
                cached.report_to(self._kv_events, self.cache_seed)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        own = (
            status_router(self._not_ready_reason),
            metrics_router(self.metrics, lambda: self._refresh(refresh)),
        )
        self._status = StatusServer(self._listener, *own, *routers, refused=self.metrics.http_refused)
        self._status.start()
        self.gateways.start()
        self.control.start()
        if membership is not None:
            self.control.periodically(HEARTBEAT_S, membership.tick)
            if cached is not None:
                self._cache_reports = CacheReports(membership, cached.newest)
                cached.report_to(self._cache_reports, self.cache_seed)

    def announce(self, transports: Transports, model_type: str, fingerprint: str) -> None:
        """Log addresses and model, and warn of what is exposed."""
        host, port = self._listener.getsockname()[:2]
        log.info(
            "node is up",
            http=f"{host}:{port}",
            control=self.control.me.address,
            transports="|".join(transports.offered),
            session=",".join(session.name for session in transports.sessions),
            transfer_ports=",".join(map(str, transports.ports)),
            model=model_type,
            fingerprint=fingerprint,
        )
        if transports.ports and (addresses := reachable_addresses()):
            log.warning(
                "the transfer ports are open at every address: anyone who reaches them can write to this node's KV",
                ports=",".join(map(str, transports.ports)),
                addresses=",".join(addresses),
                close=self._closing,
            )

    def receive(self, timeout: float) -> list[tuple[Peer, Message] | Event]:
        """Up to MOST_TAKEN items that arrived; waits `timeout` seconds for the first. Raises StartupError if refused,
        and as `check`."""
        self.control.check()
        if self._kv_events is not None:
            self._kv_events.check()
        if self._membership is not None and self._membership.rejection_reason is not None:
            raise StartupError(self._membership.rejection_reason)
        if self._cache_reports is not None:
            self._cache_reports.send(time.monotonic())
        items: list[tuple[Peer, Message] | Event] = []
        with suppress(queue.Empty):
            for number in range(MOST_TAKEN):
                item = self.inbox.get(timeout=0 if number else timeout)
                if item is not None:
                    items.append(item)
        return items

    def leave(self) -> None:
        """Tell the gateways that this node takes no new request. Its heartbeats go on while it finishes the others."""
        if self._membership is not None:
            self._membership.leave()

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
        else:
            self._listener.close()
        self.gateways.stop()
        self.control.stop()
        if self._kv_events is not None:
            self._kv_events.close()
        self.tracer.close()

    def _deliver(self, sender: Peer, message: Message) -> None:
        """On the control thread: pass a message to membership and to the node's loop."""
        if isinstance(message, Registered | Refused | HeartbeatAck) and self._membership is not None:
            self._membership.receive(sender, message)
        if self.inbox.qsize() < MAX_WAITING:
            self.inbox.put((sender, message))
        else:
            self._dropped += 1

    def _not_ready_reason(self) -> str | None:
        if not self.lifecycle.serving:
            return "draining"
        if self._membership is not None and not self._membership.is_member:
            return "not registered with a gateway"
        return None

    def _refresh(self, refresh: Callable[[], None]) -> None:
        control = self.control
        self.metrics.note_control(control.malformed, self._dropped + control.undeliverable, control.refused)
        refresh()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.lifecycle.signalled(number)
        log.info("stopping", signal=signal.Signals(number).name, phase=self.lifecycle.phase.name.lower())
        self.inbox.put(None)
