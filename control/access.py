"""Who may write to a mailbox: CURVE on its connections, and a check that each message is its sender's to send."""

import time
from collections import deque
from collections.abc import Mapping

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from base.logs import Complaints
from base.tombstones import LatestDict
from control.keys import Keys
from control.messages import Peer

log = structlog.get_logger(__name__)

HANDSHAKE_S = 5.0
"""A connection that is not set up by then is closed: it costs a descriptor and what it sent."""
REASONS = ("handshake", "key", "revoked", "role", "boot")
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"hisparse-pd"
_ALLOWED, _DENIED = b"200", b"300"
"""ZeroMQ's client never connects again after a 400. After a 300, a "temporary" failure, it does, so that a key that is
allowed later works."""
_WHY: Mapping[object, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has keys and the other has none",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has the key of another cluster",
}
_REMEMBERED = 4096


class Handshakes:
    """Counts failed handshakes: those that are not decided in time, since ZeroMQ reports only some that fail."""

    def __init__(self) -> None:
        self._under_way: deque[float] = deque()
        self._over = 0
        self._decided = 0
        self.failed = 0
        """Never falls."""

    def accepted(self, now: float) -> None:
        self._under_way.append(now)

    def decided(self) -> None:
        """A handshake succeeded, or its key was refused."""
        self._decided += 1

    def settle(self, now: float) -> None:
        """Count the handshakes whose time is over."""
        while self._under_way and now - self._under_way[0] > HANDSHAKE_S + 1.0:
            self._under_way.popleft()
            self._over += 1
        self.failed = max(self.failed, self._over - self._decided)


class Access:
    """Admits senders to a mailbox; without keys, all. Any thread may call `refused` and `is_revoked`."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", mailbox: "zmq.Socket[bytes]", keys: Keys | None
    ) -> None:
        """mailbox: not bound yet."""
        self._keys = keys
        self._mailbox = mailbox
        self._handshakes = Handshakes()
        self._refused = dict.fromkeys(REASONS, 0)
        self._complaints = Complaints()
        self._key_of_boot: LatestDict[str, str] = LatestDict(_REMEMBERED)
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        mailbox.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if keys is not None:
            mailbox.setsockopt(zmq.CURVE_SERVER, 1)
            mailbox.setsockopt(zmq.CURVE_SECRETKEY, keys.cluster.secret.encode())
            mailbox.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            mailbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = mailbox.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self.sockets = (self._zap, self._monitor)
        """To be polled: when one has something, `serve` is due."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refusals so far, by reason. Connections: `handshake` (no key, another cluster's, or garbage), `key`
        (not allowed). Messages: `revoked` key, another `role` than the key's, a `boot` id that another key has used.

        A failed handshake is counted when it could no longer have succeeded, some seconds later.
        """
        return {**self._refused, "handshake": self._handshakes.failed}

    def set_curve_keys(self, socket: "zmq.Socket[bytes]") -> None:
        """Before a socket connects: have it use this process's key, and accept only mailboxes of this cluster."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.own.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret.encode())
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.cluster.public.encode())

    def serve(self) -> None:
        """Answer requests for admission, and note which connections succeeded."""
        while self._zap.poll(0):
            self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        while self._monitor.poll(0):
            self._note(parse_monitor_message(self._monitor.recv_multipart()))

    def refresh(self) -> None:
        """Read the allowed keys again if their files changed. Due every second."""
        self._handshakes.settle(time.monotonic())
        if self._keys is not None:
            self._keys.allowed.refresh()

    def admits(self, frame: "zmq.Frame") -> bool:
        """Whether a frame's key is still allowed: its connection may be older than a revocation."""
        if self._keys is None or self._keys.allowed.role_of(key := _key_of(frame)) is not None:
            return True
        self._refuse("revoked", _address_of(frame), key=key, file=self._keys.allowed.file_of(key))
        return False

    def sender_matches_key(self, frame: "zmq.Frame", sender: Peer) -> bool:
        """Whether a sender has the role of its key, and its boot id was not used with another key before."""
        if self._keys is None:
            return True
        key = _key_of(frame)
        if self._keys.allowed.role_of(key) != sender.role:
            self._refuse("role", _address_of(frame), key=key, claimed=sender.role)
            return False
        if self._key_of_boot.get(sender.boot_id, key) != key:
            self._refuse("boot", _address_of(frame), key=key, claimed=sender.address)
            return False
        self._key_of_boot[sender.boot_id] = key
        return True

    def is_revoked(self, boot_id: str) -> bool:
        """Whether that process used a key that is not allowed any more."""
        key = self._key_of_boot.get(boot_id)
        return self._keys is not None and key is not None and self._keys.allowed.role_of(key) is None

    def close(self) -> None:
        """Close its sockets; the mailbox must not be closed yet."""
        self._mailbox.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The answer to a request for admission, as in ZAP (ZeroMQ RFC 27)."""
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
        if self._complaints.is_new((reason, about)):
            log.warning("refused on the control port", reason=reason, **what)


def _key_of(frame: "zmq.Frame") -> str:
    """The public key that a frame's connection was admitted with."""
    return str(frame.get("User-Id"))


def _address_of(frame: "zmq.Frame") -> str:
    return str(frame.get("Peer-Address"))
