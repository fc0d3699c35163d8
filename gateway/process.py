"""The gateway process: its configuration, its start and its stop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvicorn

from gateway.completer import Completer
from gateway.generation import DecodeClient
from gateway.registry import NodeRegistry
from gateway.server import OpenAiServer
from gateway.tokenizer import CheckpointTokenizer
from service.errors import StartupError
from service.exposure import check_clients, check_processes
from service.logs import LogFormat, configure_logging
from service.metrics import Metrics
from service.status import bind_http, status_router
from transfer.control import ControlPlane
from transfer.keys import load_keys
from transfer.messages import (
    Accepted,
    Heartbeat,
    Leaving,
    Message,
    Outputs,
    Peer,
    Refused,
    Register,
    Rejected,
)

log = structlog.get_logger(__name__)

_CANCEL_AT_STOP_S = 2.0
_HTTP_STOP_S = 5


@dataclass(frozen=True)
class GatewayConfig:
    """How one gateway runs. `context_length` None means the checkpoint's own; port 0 means any free port."""

    model_path: str
    served_model_name: str | None = None
    """The name that clients use; None means `model_path`."""
    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 0
    advertise_host: str = "127.0.0.1"
    context_length: int | None = None
    request_timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    key_dir: Path | None = None
    insecure: bool = False
    log_level: str = "info"
    log_format: LogFormat = "text"


def run_gateway(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError if the configuration cannot be served."""
    configure_logging(config.log_level, config.log_format, "gateway")
    gateway = Gateway(config)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, gateway.stop)
        await gateway.serve()

    asyncio.run(serve())


class _HttpServer(uvicorn.Server):
    """Leaves signals to the gateway, which has requests to cancel first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """One gateway: an HTTP port and a control port, both bound when this returns."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises StartupError if a port is taken, a key is missing or the checkpoint has no usable tokenizer."""
        self.metrics = Metrics()
        self.registry = NodeRegistry()
        check_clients(config.host, config.api_key is not None, config.insecure)
        check_processes("--control-host", config.control_host, config.key_dir, config.insecure)
        self._listener = bind_http(config.host, config.port)
        try:
            tokenizer = CheckpointTokenizer(config.model_path)
            context_length = _context_length(config, tokenizer)
            self.control = ControlPlane(
                "gateway",
                config.control_host,
                config.control_port,
                config.advertise_host,
                self._hand_over,
                keys=None if config.key_dir is None else load_keys(config.key_dir, "gateway"),
            )
        except StartupError:
            self._listener.close()
            raise
        self._refused: dict[str, str] = {}
        """Why each node was refused last: it asks every second, and is logged once."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event = asyncio.Event()
        self._client = DecodeClient(self.control, self.registry)
        self._completer = Completer(tokenizer, self._client, self.metrics, context_length, config.request_timeout)
        model = config.served_model_name or config.model_path
        app = OpenAiServer(self._completer, self.registry, model, context_length, config.api_key).app()
        app.include_router(status_router(self.metrics, self._missing, self._refresh))
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_HTTP_STOP_S,
            )
        )
        self._sizes = {
            "http": f"{config.host}:{self.port}",
            "control": self.control.me.address,
            "model": model,
            "context_length": context_length,
            "vocab_size": tokenizer.vocab_size,
            "chat": tokenizer.has_chat_template,
        }

    @property
    def port(self) -> int:
        """The HTTP port."""
        number: int = self._listener.getsockname()[1]
        return number

    async def serve(self) -> None:
        """Serve until `stop`, then end what is in flight here and at the decode nodes."""
        self._loop = asyncio.get_running_loop()
        self.control.start()
        log.info("gateway starts", **self._sizes)
        sweeping = asyncio.create_task(self._client.sweep())
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        log.info("gateway stops", requests=self._client.waiting + self._client.running)
        self._http.should_exit = True
        await self._client.close(_CANCEL_AT_STOP_S)
        await serving
        for task in (sweeping, stopping):
            task.cancel()
        self.control.stop()
        self._completer.close()
        self._listener.close()

    def stop(self) -> None:
        """Make `serve` return. Call it on the loop that serves."""
        self._stopping.set()

    def _hand_over(self, sender: Peer, message: Message) -> None:
        """From the control thread to the event loop, which owns all state."""
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
            case Leaving():
                log.info("node leaves", role=sender.role, node=sender.address)
                self.registry.leave(sender)
            case _:
                log.warning("unexpected control message", kind=type(message).__name__, sender=sender.address)

    def _register(self, sender: Peer, offer: Register) -> None:
        answer = self.registry.register(sender, offer, time.monotonic())
        if not isinstance(answer, Refused):
            self._refused.pop(sender.address, None)
            log.info("node registered", role=sender.role, node=sender.address, boot_id=sender.boot_id)
        elif self._refused.get(sender.address) != answer.reason:
            self._refused[sender.address] = answer.reason
            log.error("node refused", role=sender.role, node=sender.address, reason=answer.reason)
        self.control.send(sender, answer)

    def _missing(self) -> str | None:
        return self.registry.missing(time.monotonic())

    def _refresh(self) -> None:
        """Bring the gauges up to date before a scrape."""
        now = time.monotonic()
        self.metrics.nodes.labels(role="prefill").set(self.registry.count("prefill", now))
        self.metrics.nodes.labels(role="decode").set(self.registry.count("decode", now))
        self.metrics.requests.labels(state="waiting").set(self._client.waiting)
        self.metrics.requests.labels(state="running").set(self._client.running)
        self.metrics.note_control(self.control.malformed, self.control.undeliverable, self.control.refused)


def _context_length(config: GatewayConfig, tokenizer: CheckpointTokenizer) -> int:
    if config.context_length is None:
        return tokenizer.context_length
    if not 2 <= config.context_length <= tokenizer.context_length:
        raise StartupError(
            f"--context-length {config.context_length}: expected 2 to {tokenizer.context_length}, "
            f"the max_position_embeddings of {config.model_path}"
        )
    return config.context_length
