"""The gateway process: start, stop, and the messages of nodes."""

import asyncio
import gc
import signal
import time
from contextlib import ExitStack
from typing import Any

import structlog
from fastapi import FastAPI

from base.block_hashes import BLOCK_TOKENS, BlockHasher
from base.errors import StartupError
from base.logs import configure_logging
from base.metrics import Metrics
from base.phase import Phase
from base.tracing import tracer_to
from control.keys import cache_seed, load_keys
from control.messages import (
    Accepted,
    CacheUpdate,
    Heartbeat,
    Leaving,
    Message,
    Outputs,
    Peer,
    Refused,
    Register,
    Rejected,
)
from control.plane import ControlPlane
from gateway.access_log import AccessLog
from gateway.admission import Admission, RequestLimits
from gateway.client_usage import ClientUsage
from gateway.cluster_status import ClusterStatus
from gateway.completer import Completer
from gateway.config import API_KEYS_VARIABLE, GatewayConfig
from gateway.decode_client import SWEEP_S, DecodeClient
from gateway.errors import ApiError, unavailable
from gateway.generation import GenerationLimits
from gateway.held_answers import HeldAnswers
from gateway.keys import ApiKeys
from gateway.loop_watch import watch_loop
from gateway.prefix_routing import PrefixIndex
from gateway.preparer import Preparer, chat_format_of
from gateway.registry import NodeRegistry
from gateway.server import ApiServer
from gateway.status_page import status_page_router
from gateway.tokenizer import CheckpointTokenizer
from gateway.websocket import OpenSockets
from service.config import check_clients, check_processes
from service.connection import ConnectionLimits
from service.http_server import HttpServer
from service.lifecycle import STOP_SIGNALS, Lifecycle, raise_file_limit
from service.status import bind_http, metrics_router, status_router
from service.watched import server_tls

log = structlog.get_logger(__name__)

_CANCEL_AT_STOP_S = 2.0
_COLLECTED_AFTER = 50_000
"""Objects that may be new before the garbage collector looks at them: those of ten messages of 512 tokens."""
_MIN_BODY_BYTES = 1 << 20
_CONNECTIONS_PER_REQUEST = 4
"""Clients keep idle connections for their next requests."""
_OTHER_FILES = 256
"""File descriptors that are not for clients: the nodes' sockets, logs, modules that are imported later."""
_BODY_BYTES_PER_TOKEN = 16
"""A token takes about 8 as an id in JSON, 4 as English text, and up to 12 as escaped text."""


def run_gateway(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError if the configuration cannot be served."""
    configure_logging(config.log_level, config.log_format, "gateway")
    gateway = Gateway(config)
    # Modules and the tokenizer stay until the end, and what a message of a decode node becomes is freed by reference
    # counts. Yet it is more than the 700 new objects after which Python collects by default.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, gateway.signalled, number)
        await gateway.serve()

    asyncio.run(serve())


class Gateway:
    """A gateway with its HTTP port and its control port."""

    def __init__(self, config: GatewayConfig) -> None:
        """Binds both ports. Raises StartupError if one is taken, or if tokenizer, keys or TLS files are unusable."""
        self.metrics = Metrics()
        keys = _api_keys(config)
        tls = server_tls(config.ssl_certfile, config.ssl_keyfile)
        self.lifecycle = Lifecycle(config.drain_timeout)
        check_clients(config.host, keys is not None, config.insecure)
        check_processes("--control-host", config.bound_control_host, config.key_dir, config.insecure)
        with ExitStack() as opened:
            self._listeners = [opened.enter_context(bind_http(config.host, config.port))]
            if config.metrics_port is not None:
                listener = bind_http(config.host, config.metrics_port, "--metrics-port")
                self._listeners.append(opened.enter_context(listener))
            tokenizer = CheckpointTokenizer(str(config.model_path), config.chat_template)
            context_length = _context_length(config, tokenizer)
            limits = _request_limits(config, context_length)
            by_prefix = config.routing == "prefix"
            caches = PrefixIndex(config.max_routed_tokens // BLOCK_TOKENS) if by_prefix else None
            self.registry = NodeRegistry(tokenizer.identity, caches)
            chat_format = chat_format_of(config, tokenizer)
            cluster_keys = None if config.key_dir is None else load_keys(config.key_dir, "gateway")
            address = f"{config.advertised_host}:{self.port}"
            self.tracer = tracer_to(config.otlp_traces_endpoint, "gateway", address)
            self.control = ControlPlane(
                "gateway",
                config.bound_control_host,
                config.control_port,
                config.advertised_host,
                self._hand_over,
                keys=cluster_keys,
            )
            opened.pop_all()
        self._refused: dict[str, str] = {}
        """By address, why a node was refused last. It asks every second but is logged once."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event = asyncio.Event()
        self._client = DecodeClient(
            self.control, self.registry, GenerationLimits(config.migration_limit, config.token_timeout)
        )
        self._completer = Completer(
            config,
            Preparer(tokenizer, chat_format, BlockHasher(cache_seed(cluster_keys)) if by_prefix else None),
            self._client,
            self.registry,
            self.metrics,
            context_length,
        )
        self._conversations = HeldAnswers(
            limits.max_body_bytes, limits.max_total_bytes, self.metrics.conversations_forgotten
        )
        connections = _max_connections(config.max_concurrent_requests)
        sockets = OpenSockets(max(1, connections // _CONNECTIONS_PER_REQUEST), self._conversations)
        app = ApiServer(self._completer, self._rejection_reason, sockets).app()
        app.include_router(status_router(self._unready_reason))
        self._cluster: ClusterStatus | None = None
        if config.status_page:
            self._cluster = ClusterStatus(self.registry, self._client, self._unready_reason)
            app.include_router(status_page_router(self._cluster, keys, self.metrics.http_refused))
        metrics_app = app if config.metrics_port is None else FastAPI(openapi_url=None)
        metrics_app.include_router(metrics_router(self.metrics, self._refresh))
        self._answers = HeldAnswers(
            config.max_answer_mib << 20, config.max_total_answer_mib << 20, self.metrics.answers_ended
        )
        usage = ClientUsage(self.metrics)
        self._admission = Admission(
            app, keys, limits, self._answers, usage, self.metrics.http_refused, config.allowed_origins
        )
        self._http = HttpServer(
            AccessLog(self._admission, self.metrics.http_requests, self.tracer),
            self._listeners[0],
            ConnectionLimits(connections, config.header_timeout, max_message_bytes=limits.max_body_bytes),
            self.metrics.http_refused,
            tls=None if tls is None else tls.get,
            stop_timeout=5,
        )
        self._servers = [self._http]
        for listener in self._listeners[1:]:
            self._servers.append(HttpServer(metrics_app, listener, ConnectionLimits(), self.metrics.http_refused))
        self._sizes = {
            "http": f"{config.host}:{self.port}",
            "tls": tls is not None,
            "api_keys": 0 if keys is None else len(keys),
            "control": self.control.me.address,
            "model": ", ".join(config.model_names),
            "context_length": context_length,
            "vocab_size": tokenizer.vocab_size,
            "chat": None if chat_format is None else chat_format.name,
        }

    @property
    def metrics_port(self) -> int:
        return int(self._listeners[-1].getsockname()[1])

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    async def serve(self) -> None:
        """Serve until told to stop, drain, and end the requests that are left, also at the decode nodes."""
        self._loop = asyncio.get_running_loop()
        self.control.start()
        log.info("gateway starts", **self._sizes)
        sweeping = asyncio.create_task(self._client.sweep())
        serving = asyncio.gather(*(server.serve() for server in self._servers))
        watching = asyncio.create_task(self._watch_nodes())
        running = [sweeping, watching, asyncio.create_task(watch_loop(self.metrics.loop_delay))]
        if self._cluster is not None:
            running.append(asyncio.create_task(self._cluster.sample_always()))
        stopping = asyncio.create_task(self._drained())
        awaited: list[asyncio.Future[Any]] = [serving, stopping, *running]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        log.info("gateway stops", requests=len(self._client.attempts))
        for server in self._servers:
            server.should_exit = True
        await self._client.close(_CANCEL_AT_STOP_S)
        await serving
        for task in (*running, stopping):
            task.cancel()
        self.control.stop()
        self._completer.close()
        self.tracer.close()
        for task in running:
            if task.done() and (failure := task.exception()):
                raise failure

    def signalled(self, number: int) -> None:
        """Handle a stop signal. Call it on the loop that serves."""
        self.lifecycle.signalled(number)
        log.info("stopping", signal=signal.Signals(number).name, phase=self.lifecycle.phase.name.lower())
        self._stopping.set()

    async def _drained(self) -> None:
        """Wait until told to stop, and then until no request is left or draining is over."""
        await self._stopping.wait()
        while self.lifecycle.phase is Phase.DRAINING and self._client.attempts:
            await asyncio.sleep(0.05)

    async def _watch_nodes(self) -> None:
        """Log each node that falls silent, or is heard again."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for peer, is_live in self.registry.liveness_changes(time.monotonic()):
                say, event = (log.info, "node found again") if is_live else (log.warning, "node lost")
                say(event, role=peer.role, node=peer.address, boot_id=peer.boot_id)

    def _hand_over(self, sender: Peer, message: Message) -> None:
        """On the control thread: pass a message to the event loop, which owns all state."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._receive, sender, message)

    def _receive(self, sender: Peer, message: Message) -> None:
        match message:
            case Accepted() | Rejected() | Outputs():
                self._client.deliver(sender, message)
            case Heartbeat():
                self.control.send(sender, self.registry.heartbeat(sender, message, time.monotonic()))
            case Register():
                self._register(sender, message)
            case CacheUpdate():
                self.registry.note_cache(sender, message)
            case Leaving():
                log.info("node leaves", role=sender.role, node=sender.address)
                self.registry.leave(sender)
            case _:
                log.warning("unexpected control message", kind=type(message).__name__, sender=sender.address)

    def _register(self, sender: Peer, offer: Register) -> None:
        known = self.registry.knows(sender)
        answer = self.registry.register(sender, offer, time.monotonic())
        if not isinstance(answer, Refused):
            self._refused.pop(sender.address, None)
            if not known:
                log.info("node registered", role=sender.role, node=sender.address, boot_id=sender.boot_id)
        elif self._refused.get(sender.address) != answer.reason:
            self._refused[sender.address] = answer.reason
            log.error("node refused", role=sender.role, node=sender.address, reason=answer.reason)
        self.control.send(sender, answer)

    def _unready_reason(self) -> str | None:
        return self.registry.unready_reason(time.monotonic()) if self.lifecycle.serving else "draining"

    def _rejection_reason(self) -> ApiError | None:
        if not self.lifecycle.serving:
            return ApiError(503, "the gateway is shutting down", code="draining", retry_after=1.0)
        reason = self._unready_reason()
        return None if reason is None else unavailable(reason)

    def _refresh(self) -> None:
        now = time.monotonic()
        self.metrics.nodes.labels(role="prefill").set(self.registry.count("prefill", now))
        self.metrics.nodes.labels(role="decode").set(self.registry.count("decode", now))
        self.metrics.kv_usage.set(self.registry.kv_usage(now))
        waiting = sum(not attempt.received for attempt in self._client.attempts.values())
        self.metrics.requests.labels(state="waiting").set(waiting)
        self.metrics.requests.labels(state="running").set(len(self._client.attempts) - waiting)
        self.metrics.answer_bytes.set(self._answers.held)
        self.metrics.note_control(self.control.malformed, self.control.undeliverable, self.control.refused)


def _api_keys(config: GatewayConfig) -> ApiKeys | None:
    """Those that clients need; None if they need none."""
    if config.api_keys or config.api_key_file:
        if config.status_page and config.operator_key_file is None:
            raise StartupError("--status-page: clients need keys here, so operators do, too: give --operator-key-file")
        return ApiKeys(config.api_keys, config.api_key_file, config.priority_key_file, config.operator_key_file)
    needed = f"other clients need keys, too: give --api-key-file (or {API_KEYS_VARIABLE})"
    if config.priority_key_file:
        instead = "or --allow-priority instead, if all clients may go before others"
        raise StartupError(f"--priority-key-file {config.priority_key_file}: {needed}; {instead}")
    if config.operator_key_file:
        raise StartupError(f"--operator-key-file {config.operator_key_file}: {needed}")
    return None


def _context_length(config: GatewayConfig, tokenizer: CheckpointTokenizer) -> int:
    if config.context_length is None:
        return tokenizer.context_length
    if not 2 <= config.context_length <= tokenizer.context_length:
        raise StartupError(
            f"--context-length {config.context_length}: expected 2 to {tokenizer.context_length}, "
            f"the max_position_embeddings of {config.model_path}"
        )
    return config.context_length


def _request_limits(config: GatewayConfig, context_length: int) -> RequestLimits:
    """Raises StartupError for a limit of all requests that is less than that of one."""
    body_bytes = max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * context_length)
    if config.max_body_mib is not None:
        body_bytes = config.max_body_mib << 20
    total_bytes = config.max_total_body_mib << 20
    if total_bytes < body_bytes:
        raise StartupError(
            f"--max-total-body-mib {config.max_total_body_mib} is less than the largest body, "
            f"{body_bytes / 2**20:g} MiB (--max-body-mib): raise it, or lower that"
        )
    if config.max_total_answer_mib < config.max_answer_mib:
        raise StartupError(
            f"--max-total-answer-mib {config.max_total_answer_mib} is less than what one request may take, "
            f"{config.max_answer_mib} (--max-answer-mib): raise it, or lower that"
        )
    return RequestLimits(body_bytes, config.max_concurrent_requests, total_bytes)


def _max_connections(requests: int) -> int:
    """Connections for that many requests at a time, within the limit of open files."""
    room = max(1, raise_file_limit() - _OTHER_FILES)
    if room < requests:
        log.warning("few open files are allowed; connections are refused before requests", connections=room)
    return min(_CONNECTIONS_PER_REQUEST * requests, room)
