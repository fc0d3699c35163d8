"""Which processes live: whose frames were read, and which pings were answered.

A frame proves only that its sender lived when it wrote it, which may be long before it is read. An answered ping proves
that the process lived after the ping was sent, by the clock of the process that asks.
"""

import secrets
import time
from dataclasses import dataclass, replace

from base.tombstones import LatestDict
from control.messages import Peer, Ping, Pong

_ANSWERED_WITHIN_S = 30.0
"""A later answer proves nothing that anyone asks about."""
_REMEMBERED = 4096


@dataclass(frozen=True)
class AnsweredPing:
    """Process `boot_id` lived after `asked_at` (time.monotonic), when the ping that it answered was sent."""

    boot_id: str
    asked_at: float


@dataclass(frozen=True)
class _Signs:
    """heard: when the last frame was read. answer: to the latest ping that was answered."""

    heard: float
    answer: AnsweredPing | None = None


_NONE = _Signs(0.0)


class Liveness:
    """Signs of life, by process and by address. The control thread notes them; any thread may ask, without a lock."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[str, float]] = {}
        """Address and time of the pings that were not answered yet, by nonce, the oldest first."""
        self._boots: LatestDict[str, _Signs] = LatestDict(_REMEMBERED)
        self._addresses: LatestDict[str, _Signs] = LatestDict(_REMEMBERED)

    def last_heard(self, boot_id: str) -> float | None:
        """When a frame of that process was last read (time.monotonic), or None."""
        return self._boots.get(boot_id, _NONE).heard or None

    def last_heard_at(self, address: str) -> float | None:
        """When a frame that names that address as its sender's was last read, or None."""
        return self._addresses.get(address, _NONE).heard or None

    def alive_after(self, boot_id: str) -> float | None:
        """When the process was sent the latest ping that it answered: it lived after that."""
        answer = self._boots.get(boot_id, _NONE).answer
        return None if answer is None else answer.asked_at

    def answer_at(self, address: str) -> AnsweredPing | None:
        """The answer to the latest ping to that address that was answered."""
        return self._addresses.get(address, _NONE).answer

    def ask(self, address: str) -> Ping:
        """A ping for the process at that address. Nobody else knows its nonce."""
        now = time.monotonic()
        while self._asked and now - next(iter(self._asked.values()))[1] > _ANSWERED_WITHIN_S:
            del self._asked[next(iter(self._asked))]
        nonce = secrets.randbits(63)
        self._asked[nonce] = (address, now)
        return Ping(nonce=nonce)

    def heard(self, sender: Peer) -> None:
        """Note that a frame of this process was read."""
        for table, key in ((self._boots, sender.boot_id), (self._addresses, sender.address)):
            table[key] = replace(table.get(key, _NONE), heard=time.monotonic())

    def answered(self, sender: Peer, pong: Pong) -> None:
        """Note that this process answered a ping. A ping that was never sent, or long ago, proves nothing."""
        if (asked := self._asked.pop(pong.nonce, None)) is None:
            return
        address, asked_at = asked
        for table, key in ((self._boots, sender.boot_id), (self._addresses, address)):
            known = table.get(key, _NONE)
            if known.answer is None or known.answer.asked_at <= asked_at:
                table[key] = replace(known, answer=AnsweredPing(sender.boot_id, asked_at))
