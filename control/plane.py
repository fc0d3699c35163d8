"""The control plane: typed messages between processes over ZeroMQ. docs/protocol.md has the protocol.

Every process binds one PULL socket, its mailbox, and connects a PUSH socket to each mailbox that it writes to. Delivery
is at most once. What must arrive is sent with `repeat` until `answered`, so every handler is idempotent. A frame names
the boot that may act on it, so a restarted process ignores what was sent to its predecessor.

The control thread answers pings and sends heartbeats, so a process that computes for seconds is not taken for dead. If
that thread ends, the process should end (`check`).
"""

import math
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog
import zmq

from base.errors import ProcessFailed, StartupError
from base.logs import Complaints
from control.access import Access
from control.codec import PROTOCOL_VERSION, Frame, Greeting, MalformedMessage, decode, encode
from control.connections import MAX_QUEUED, Connections
from control.keys import Keys
from control.liveness import Liveness
from control.messages import ADDRESS_PATTERN, Message, Peer, Ping, Pong, Refused, Registered, Role
from control.repeats import Repeats

log = structlog.get_logger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A larger frame ends its connection. The largest that is needed is a prompt of a million tokens whose slots all lie
apart: 5 bytes per token and 7 per slot."""
PING_S = 0.5
_KEYS_S = 1.0
_KEEPALIVE_S = 60
_MOST_UNREACHABLE = 100


@dataclass
class _Periodic:
    action: Callable[[], None]
    every: float
    due: float = 0.0


class ControlPlaneFailed(ProcessFailed):
    """The control thread has ended by itself: this process hears nobody, and nobody hears it."""


class ControlPlane:
    """One process's mailbox and its connections to others.

    The control thread owns the sockets. Any thread may call the public methods, which hand over through a queue.
    `deliver` is called on the control thread for each valid message and must not block.
    Without `keys`, nothing is encrypted, and anyone who reaches the port may write to this process.
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
        # For the sockets between threads, which must never make one wait.
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._mailbox = self._context.socket(zmq.PULL)
        self._mailbox.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._mailbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._mailbox.setsockopt(zmq.LINGER, 0)
        self._access = Access(self._context, self._mailbox, keys)
        # Otherwise a peer's old connection stays in addition to the new one after a partition.
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
        self._liveness = Liveness()
        self.last_heard = self._liveness.last_heard
        self.answer_at = self._liveness.answer_at
        self.alive_after = self._liveness.alive_after
        self._repeats = Repeats(self._liveness.last_heard_at)
        self._periodic: list[_Periodic] = [
            _Periodic(lambda: self._ping(self._watched.values()), PING_S),
            _Periodic(self._access.refresh, _KEYS_S),
        ]
        self._watched: dict[str, Peer] = {}
        self._malformed_complaints, self._version_complaints = Complaints(), Complaints()
        self._other_versions = 0
        self._unreachable: set[str] = set()
        """Addresses that did not take a frame, which was logged, and were not heard since."""
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self.malformed = 0
        self.undeliverable = 0
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refusals, by reason: see `Access.refused`, and `version` for messages of another wire version."""
        return {**self._access.refused, "version": self._other_versions}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what was handed over before, then close, also if it was never started. Idempotent."""
        if self._thread.is_alive():
            self._hand_over(self._stopping.set)
            self._thread.join()
        elif not self._mailbox.closed:
            self._close()

    def send(self, to: Peer, message: Message | Callable[[], Message], *, any_boot: bool = False) -> None:
        """Send once. message: or what makes it, on the control thread. any_boot: any process there may act on it."""
        self._hand_over(lambda: self._send(to, message if isinstance(message, Message) else message(), any_boot))

    def repeat(
        self, key: Hashable, to: Peer, message: Message, *, every: float = 0.5, give_up_after: float = math.inf
    ) -> None:
        """Send every `every` seconds until `answered(key)`, less often to a silent peer. Replaces what has the key."""
        self._hand_over(lambda: self._repeats.add(key, to, message, every, give_up_after))

    def answered(self, key: Hashable) -> None:
        """Stop repeating. Harmless if nothing is repeated under the key."""
        self._hand_over(lambda: self._repeats.forget(key))

    def periodically(self, every: float, action: Callable[[], None]) -> None:
        """Run an action, which must not block, on the control thread: now and every `every` seconds."""
        self._hand_over(lambda: self._periodic.append(_Periodic(action, every)))

    def watch(self, peers: Iterable[Peer]) -> None:
        """Ping these processes from now on, and no others. Any process at the address answers, so a restart shows."""
        watched = {peer.boot_id: peer for peer in peers}
        self._hand_over(lambda: self._replace_watched(watched))

    def is_revoked(self, peer: Peer) -> bool:
        """Whether the key that this process spoke with is not allowed any more."""
        return self._access.is_revoked(peer.boot_id)

    def silence(self, peer: Peer) -> float:
        """Seconds since the latest answered ping was sent, or infinite. Other messages may be old, and do not count."""
        alive = self.alive_after(peer.boot_id)
        return math.inf if alive is None else time.monotonic() - alive

    def check(self) -> None:
        """Raise ControlPlaneFailed if the control thread has ended by itself. The main loop calls it."""
        if self._failure is not None:
            raise ControlPlaneFailed(f"the control thread has ended: {self._failure!r}") from self._failure

    def _hand_over(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with self._wake_lock:
            if not self._wake_sender.closed:
                self._wake_sender.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        try:
            self._serve()
            self._close()
        except BaseException as error:
            log.critical("the control thread has ended", error=repr(error))
            self._failure = error

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        for socket in self._access.sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            soonest = min(self._repeats.next_due, *(periodic.due for periodic in self._periodic))
            ready = dict(poller.poll(max(0, min(1000, int((soonest - time.monotonic()) * 1000) + 1))))
            if self._wake_receiver in ready:
                self._wake_receiver.recv()
                self._guarded(self._commands.get())
            if self._mailbox in ready:
                self._guarded(partial(self._receive, self._mailbox.recv(copy=False)))
            if any(socket in ready for socket in self._access.sockets):
                self._access.serve()
            self._send_due()

    def _receive(self, received: zmq.Frame) -> None:
        if not self._access.admits(received):
            return
        try:
            frame, message = decode(received.bytes)
        except MalformedMessage as error:
            self.malformed += 1
            if self._malformed_complaints.is_new(str(error)):
                log.warning("dropped a malformed control message", error=str(error), bytes=len(received.bytes))
            return
        sender = frame.sender
        if not self._access.sender_matches_key(received, sender):
            return
        if frame.to not in ("", self.me.boot_id):
            log.info("dropped a message for an earlier boot", kind=frame.kind, sender=sender.address)
            return
        self._liveness.heard(sender)
        self._unreachable.discard(sender.address)
        match message:
            case Ping(nonce=nonce):
                self._send(sender, Pong(nonce=nonce), version=frame.v)
            case Pong():
                self._liveness.answered(sender, message)
            case Message() if frame.v == PROTOCOL_VERSION:
                self._deliver(sender, message)
            case Refused():
                self._deliver(sender, message)
            case _:
                self._refuse_version(frame, message)

    def _refuse_version(self, frame: Frame, stable: Message | Greeting | None) -> None:
        """Tell a process of another wire version that the two do not work together. Count and drop what it said."""
        sender, reason = frame.sender, f"wire version {frame.v} != {PROTOCOL_VERSION}"
        match stable:
            case Greeting(via=via) if self.me.role == "gateway":
                text = f"{sender.role} node {sender.address} refused: {reason} of this gateway"
                self._send(sender, Refused(via=via, reason=text), version=frame.v)
            case Registered(via=via):
                self._deliver(sender, Refused(via=via, reason=reason))
        self._other_versions += 1
        if self._version_complaints.is_new(sender):
            log.warning("a process of another wire version", peer=sender.address, role=sender.role, reason=reason)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Call it. A bug in it costs one message or one turn, not the mailbox."""
        try:
            action()
        except Exception:
            log.exception("control handler failed")

    def _replace_watched(self, watched: dict[str, Peer]) -> None:
        new = [peer for boot_id, peer in watched.items() if boot_id not in self._watched]
        self._watched = watched
        self._ping(new)

    def _ping(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._send(peer, self._liveness.ask(peer.address), any_boot=True)

    def _send_due(self) -> None:
        now = time.monotonic()
        for periodic in self._periodic:
            if periodic.due <= now:
                periodic.due = now + periodic.every
                self._guarded(periodic.action)
        for repeated in self._repeats.take_due(now):
            if now >= repeated.until:
                log.warning("never answered", to=repeated.peer.address, kind=type(repeated.message).__name__)
            else:
                self._guarded(partial(self._send, repeated.peer, repeated.message))

    def _send(self, to: Peer, message: Message, any_boot: bool = False, version: int = PROTOCOL_VERSION) -> None:
        frame = encode(message, self.me, "" if any_boot else to.boot_id, version)
        try:
            if len(frame) > MAX_FRAME_BYTES:
                raise ValueError(f"{len(frame)} bytes; a frame has at most {MAX_FRAME_BYTES}")
            self._connections.post(to.address, frame, self._liveness.last_heard_at(to.address))
        except (zmq.ZMQError, ValueError) as error:
            # A full queue, or an address that cannot be connected to: a peer names its own, so it may be anything.
            self.undeliverable += 1
            if to.address not in self._unreachable:
                if len(self._unreachable) >= _MOST_UNREACHABLE:
                    self._unreachable.clear()
                self._unreachable.add(to.address)
                log.warning("undeliverable", to=to.address, kind=type(message).__name__, error=str(error))

    def _close(self) -> None:
        with self._wake_lock:
            self._wake_sender.close()
        self._wake_receiver.close()
        self._access.close()
        self._mailbox.close()
        self._connections.close()
        self._context.term()
