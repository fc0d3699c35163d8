"""The control plane: typed messages between processes over ZeroMQ.

Every process binds one PULL socket, its mailbox, and connects a PUSH socket to each mailbox that it writes to.
Delivery is at most once; what must arrive is sent with `repeat`, which sends it again until `answered` says stop, so
every handler is idempotent. A frame names the boot that it is meant for: one queued for a process that has died is
not acted on by the process that took its address.

With keys, connections are encrypted, and only processes of the cluster are spoken and listened to; see
`transfer/access.py`.

Liveness lives here too, on the control thread: a process that computes for seconds still answers pings and still sends
its heartbeats.
"""

import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import structlog
import zmq

from service.errors import StartupError
from transfer.access import Access
from transfer.codec import MalformedMessage, decode, encode
from transfer.connections import MAX_QUEUED, Connections
from transfer.keys import Keys
from transfer.messages import ADDRESS_PATTERN, Message, Peer, Ping, Pong, Role

log = structlog.get_logger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A larger frame ends its connection. The largest that is needed: a prompt of a million tokens whose slots all lie
apart takes 5 bytes per token and 7 per slot; its checksums, in chunks of 2048 tokens and 160 buffers, take 4 MiB."""
PING_S = 0.5
_KEYS_S = 1.0
_SILENT_S = 60.0
_KEEPALIVE_S = 60
_REMEMBERED_BOOTS = 4096


@dataclass
class _Repeated:
    peer: Peer
    message: Message
    any_boot: bool
    every: float
    due: float


@dataclass
class _Periodic:
    action: Callable[[], None]
    every: float
    due: float = 0.0


class Undeliverable(Exception):
    """A message that no peer would take."""


class ControlPlane:
    """One process's mailbox and its connections to others.

    A thread of its own owns the sockets. `send`, `repeat` and `answered` may be called from any thread; they hand over
    through a queue. `deliver` is called on the control thread for each valid message and must not block.

    Without `keys`, nothing is encrypted, and anyone who reaches the port may speak to this process.
    Raises StartupError if the port is taken.
    """

    def __init__(
        self,
        role: Role,
        host: str,
        port: int,
        advertise_host: str,
        deliver: Callable[[Peer, Message], None],
        keys: Keys | None = None,
    ) -> None:
        if not re.match(ADDRESS_PATTERN, f"{advertise_host}:0"):
            raise StartupError(f"--advertise-host {advertise_host}: expected a host name or an IPv4 address")
        self._deliver = deliver
        self._context = zmq.Context(io_threads=1)
        # Of the sockets between threads, which must never make one wait.
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._access = Access(self._context, keys)
        self._mailbox = self._context.socket(zmq.PULL)
        self._mailbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._mailbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._mailbox.setsockopt(zmq.LINGER, 0)
        self._access.protect(self._mailbox)
        # Of a peer that a partition took away, the old connection would stay beside the new one.
        self._mailbox.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._mailbox.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        try:
            if port == 0:
                port = self._mailbox.bind_to_random_port(f"tcp://{host}")
            else:
                self._mailbox.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(
                f"cannot bind the control port {host}:{port}: {error.strerror}; choose another --control-port"
            ) from error
        self.me = Peer(role=role, address=f"{advertise_host}:{port}", boot_id=secrets.token_hex(8))
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind("inproc://wake")
        self._wake_sender = self._context.socket(zmq.PAIR)
        self._wake_sender.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        """Guards _wake_sender: ZeroMQ sockets are not thread safe."""
        self._connections = Connections(self._context, self._access)
        self._repeated: dict[Hashable, _Repeated] = {}
        self._periodic: list[_Periodic] = [
            _Periodic(self._ping_watched, PING_S),
            _Periodic(self._access.refresh, _KEYS_S),
        ]
        self._watched: dict[str, Peer] = {}
        self._heard: dict[str, float] = {}
        self._complained: set[str] = set()
        self._stopping = False
        self.malformed = 0
        self.undeliverable = 0
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections and messages that were turned away, by reason. See `Access.refused`."""
        return self._access.refused

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what was handed over before, then close; also if it was never started. Idempotent."""
        if self._thread.is_alive():
            self._hand_over(self._request_stop)
            self._thread.join()
        elif not self._mailbox.closed:
            self._close()

    def send(self, to: Peer, message: Message, *, any_boot: bool = False) -> None:
        """Send once. With `any_boot`, whoever has the address now may act on it."""
        self._hand_over(lambda: self._send(to, message, any_boot))

    def repeat(self, key: Hashable, to: Peer, message: Message, *, any_boot: bool = False, every: float = 0.5) -> None:
        """Send now and again every so many seconds until `answered(key)`."""
        repeated = _Repeated(to, message, any_boot, every, due=0.0)
        self._hand_over(lambda: self._repeated.update({key: repeated}))

    def answered(self, key: Hashable) -> None:
        """Stop repeating; harmless if nothing is repeated under the key."""
        self._hand_over(lambda: self._forget(key))

    def periodically(self, every: float, action: Callable[[], None]) -> None:
        """Run an action on the control thread every so many seconds, the first time at once. It must not block."""
        self._hand_over(lambda: self._periodic.append(_Periodic(action, every)))

    def watch(self, peers: Iterable[Peer]) -> None:
        """Ping these processes from now on, and no others. Whoever has the address answers, so that a restart shows."""
        watched = {peer.boot_id: peer for peer in peers}
        self._hand_over(lambda: self._replace_watched(watched))

    def last_heard(self, boot_id: str) -> float | None:
        """When a frame of that boot last arrived (time.monotonic), or None."""
        return self._heard.get(boot_id)

    def is_revoked(self, peer: Peer) -> bool:
        """Whether the key that this process spoke with is not allowed any more."""
        return self._access.is_revoked(peer.boot_id)

    def silence(self, peer: Peer) -> float:
        """For how many seconds that process has not been heard; infinite if it never was."""
        heard = self._heard.get(peer.boot_id)
        return float("inf") if heard is None else time.monotonic() - heard

    def _hand_over(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with self._wake_lock:
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        for socket in self._access.sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(self._poll_timeout_ms()))
            if self._wake_receiver in ready:
                self._wake_receiver.recv()
                self._commands.get()()
            if self._mailbox in ready:
                self._receive(self._mailbox.recv(copy=False))
            if any(socket in ready for socket in self._access.sockets):
                self._access.serve()
            self._send_due()
        self._close()

    def _poll_timeout_ms(self) -> int:
        soonest = min([repeated.due for repeated in self._repeated.values()] + [p.due for p in self._periodic])
        return max(0, min(1000, int((soonest - time.monotonic()) * 1000) + 1))

    def _receive(self, frame: zmq.Frame) -> None:
        if not self._access.admits(frame):
            return
        try:
            sender, to, message = decode(frame.bytes)
        except MalformedMessage as error:
            self.malformed += 1
            if (complaint := str(error)) not in self._complained and len(self._complained) < 100:
                self._complained.add(complaint)
                log.warning("dropped a malformed control message", error=complaint, bytes=len(frame.bytes))
            return
        if not self._access.vouches(frame, sender):
            return
        if to and to != self.me.boot_id:
            log.info("dropped a message for an earlier boot", kind=type(message).__name__, sender=sender.address)
            return
        self._note_heard(sender.boot_id)
        if isinstance(message, Ping):
            self._send(sender, Pong(), any_boot=False)
        else:
            self._guarded(lambda: self._deliver(sender, message))

    def _note_heard(self, boot_id: str) -> None:
        now = time.monotonic()
        if len(self._heard) >= _REMEMBERED_BOOTS and boot_id not in self._heard:
            self._heard = {boot: at for boot, at in self._heard.items() if now - at < _SILENT_S}
        self._heard[boot_id] = now

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run a handler. Its bug costs its message, not the mailbox of everyone else."""
        try:
            action()
        except Exception:
            log.exception("control handler failed")

    def _replace_watched(self, watched: dict[str, Peer]) -> None:
        self._watched = watched

    def _ping_watched(self) -> None:
        for peer in self._watched.values():
            self._send(peer, Ping(), any_boot=True)

    def _forget(self, key: Hashable) -> None:
        self._repeated.pop(key, None)

    def _send_due(self) -> None:
        now = time.monotonic()
        for periodic in self._periodic:
            if periodic.due <= now:
                periodic.due = now + periodic.every
                self._guarded(periodic.action)
        for repeated in self._repeated.values():
            if repeated.due <= now:
                repeated.due = now + repeated.every
                self._send(repeated.peer, repeated.message, repeated.any_boot)

    def _send(self, to: Peer, message: Message, any_boot: bool) -> None:
        try:
            frame = encode(message, self.me, "" if any_boot else to.boot_id)
            if len(frame) > MAX_FRAME_BYTES:
                raise Undeliverable(f"{len(frame)} bytes; a frame has at most {MAX_FRAME_BYTES}")
            self._connections.post(to.address, frame)
        except (zmq.ZMQError, Undeliverable) as error:
            # A full queue, or an address that cannot be connected to: a peer names its own, so it may be anything.
            self.undeliverable += 1
            log.warning("undeliverable", to=to.address, kind=type(message).__name__, error=str(error))

    def _close(self) -> None:
        with self._wake_lock:
            self._wake_sender.close()
        self._wake_receiver.close()
        self._access.close(self._mailbox)
        self._mailbox.close()
        self._connections.close()
        self._context.term()
