"""Who may use a mailbox: CURVE on its connections, and whether each message is its sender's to send.

With keys, every connection is encrypted and both ends are proved: a mailbox has the cluster's secret, whoever writes
to it a key that is allowed. Without keys, anyone may connect. Either way, what is turned away is counted.
"""

import time
from collections import deque
from collections.abc import Mapping

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from control.keys import Keys
from control.messages import Peer

log = structlog.get_logger(__name__)

HANDSHAKE_S = 5.0
"""A connection that is not set up after so long is closed: until then it costs a descriptor and what it has sent."""
REASONS = ("handshake", "key", "revoked", "role", "boot")
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"hisparse-pd"
_ALLOWED, _DENIED = b"200", b"300"
"""ZeroMQ's client never connects again after a 400; after a 300, a "temporary" failure, it does. A key that is allowed
later must work then."""
_WHY: Mapping[object, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has keys and the other has none",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has the key of another cluster",
}
_REMEMBERED = 4096
_COMPLAINTS = 100


class Handshakes:
    """How many connections came to nothing. Time comes in as an argument.

    ZeroMQ tells of every connection that it accepts and of every handshake that succeeds, but only of some of those
    that fail. So what was accepted longer ago than a handshake may take, and was not decided otherwise, has failed.
    """

    def __init__(self) -> None:
        self._under_way: deque[float] = deque()
        self._over = 0
        self._decided = 0
        self.failed = 0
        """Never less than before: of those that were decided early, some are still counted as under way."""

    def accepted(self, now: float) -> None:
        self._under_way.append(now)

    def decided(self) -> None:
        """One succeeded, or its key was refused."""
        self._decided += 1

    def settle(self, now: float) -> None:
        """Count those whose time is over."""
        while self._under_way and now - self._under_way[0] > HANDSHAKE_S + 1.0:
            self._under_way.popleft()
            self._over += 1
        self.failed = max(self.failed, self._over - self._decided)


class Access:
    """Admits to one mailbox, and introduces this process to others. The control thread owns it.

    Only `refused` and `is_revoked` may be called from any thread.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys | None) -> None:
        self._keys = keys
        self._handshakes = Handshakes()
        self._refused = dict.fromkeys(REASONS, 0)
        self._complained: set[tuple[str, str]] = set()
        self._key_of_boot: dict[str, str] = {}
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        """To be polled; when one has something, `serve` is due."""
        return (self._zap,) if self._monitor is None else (self._zap, self._monitor)

    @property
    def refused(self) -> Mapping[str, int]:
        """What was turned away so far, by reason: connections without a handshake (no key or the wrong cluster's, or
        garbage) or by a key that is not allowed; messages by a revoked key, in another role than the key's, or in the
        name of a process that spoke with another key before.

        A failed handshake is counted when it could no longer have succeeded, some seconds later.
        """
        return {**self._refused, "handshake": self._handshakes.failed}

    def protect(self, mailbox: "zmq.Socket[bytes]") -> None:
        """Let only whom the keys allow connect. Before it is bound."""
        mailbox.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._keys is not None:
            mailbox.setsockopt(zmq.CURVE_SERVER, 1)
            mailbox.setsockopt(zmq.CURVE_SECRETKEY, self._keys.cluster.secret.encode())
            mailbox.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            mailbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = mailbox.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )

    def introduce(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket speak with this process's key, and only to a mailbox of this cluster. Before it connects."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.own.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret.encode())
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.cluster.public.encode())

    def serve(self) -> None:
        """Answer who asks to be let in, and take note of how connections fared."""
        while self._zap.poll(0):
            self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        while self._monitor is not None and self._monitor.poll(0):
            self._note(parse_monitor_message(self._monitor.recv_multipart()))

    def refresh(self) -> None:
        """Read the allowed keys again if they were changed. Due every second."""
        self._handshakes.settle(time.monotonic())
        if self._keys is not None:
            self._keys.allowed.refresh()

    def admits(self, frame: "zmq.Frame") -> bool:
        """Whether a frame came by a key that is still allowed: its connection may be older than a revocation."""
        if self._keys is None or self._keys.allowed.role_of(key := _key_of(frame)) is not None:
            return True
        self._refuse("revoked", _address_of(frame), key=key, file=self._keys.allowed.file_of(key))
        return False

    def vouches(self, frame: "zmq.Frame", sender: Peer) -> bool:
        """Whether a sender is what its key says, and a process keeps to the key that it spoke with first."""
        if self._keys is None:
            return True
        key = _key_of(frame)
        if self._keys.allowed.role_of(key) != sender.role:
            self._refuse("role", _address_of(frame), key=key, claimed=sender.role)
            return False
        if sender.boot_id not in self._key_of_boot and len(self._key_of_boot) >= _REMEMBERED:
            del self._key_of_boot[next(iter(self._key_of_boot))]
        if self._key_of_boot.setdefault(sender.boot_id, key) != key:
            self._refuse("boot", _address_of(frame), key=key, claimed=sender.address)
            return False
        return True

    def is_revoked(self, boot_id: str) -> bool:
        """Whether that process spoke with a key that is not allowed any more."""
        key = self._key_of_boot.get(boot_id)
        return self._keys is not None and key is not None and self._keys.allowed.role_of(key) is None

    def close(self, mailbox: "zmq.Socket[bytes]") -> None:
        """Close its sockets; the mailbox must not be closed yet."""
        if self._monitor is not None:
            mailbox.disable_monitor()
            self._monitor.close(linger=0)
        self._zap.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """What ZAP (ZeroMQ RFC 27) answers to a request for admission."""
        version, number, _, address, _, mechanism, *credentials = request
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        if self._keys is not None and self._keys.allowed.role_of(key) is not None:
            return [version, number, _ALLOWED, b"", key.encode(), b""]
        self._handshakes.decided()
        self._refuse("key", address.decode(errors="replace"), key=key)
        return [version, number, _DENIED, b"", b"", b""]

    def _note(self, event: Mapping[str, object]) -> None:
        match event["event"]:
            case zmq.EVENT_ACCEPTED:
                self._handshakes.accepted(time.monotonic())
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes.decided()
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                why = _WHY.get(event["value"], "it does not speak ZeroMQ's protocol")
                self._complain("handshake", why, why=why)
            case _:
                self._complain("handshake", "", why="it broke off or took too long")

    def _refuse(self, reason: str, address: str, **what: str | None) -> None:
        self._refused[reason] += 1
        self._complain(reason, address, address=address, **what)

    def _complain(self, reason: str, about: str, **what: str | None) -> None:
        """Say it once: someone who knocks again and again fills no log."""
        if (reason, about) not in self._complained and len(self._complained) < _COMPLAINTS:
            self._complained.add((reason, about))
            log.warning("refused on the control port", reason=reason, **what)


def _key_of(frame: "zmq.Frame") -> str:
    """The public key that a frame's connection was admitted with."""
    return str(frame.get("User-Id"))


def _address_of(frame: "zmq.Frame") -> str:
    return str(frame.get("Peer-Address"))
