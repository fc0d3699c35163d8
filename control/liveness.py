"""What is known of who lives: whose frames were read, and which pings were answered.

A frame says that its sender lived when it wrote it. That may be long before it is read: a process that was stopped
finds in its mailbox what others said before they died. An answered ping says more: whoever answers it has lived after
it was sent. When that was is known by the clock of this process alone.
"""

import secrets
import time
from dataclasses import dataclass, field, replace

from control.messages import Peer, Ping, Pong

_ANSWERED_WITHIN_S = 30.0
"""An answer that is later than this proves nothing that anyone asks about."""
_REMEMBERED = 4096
_FORGOTTEN_AFTER_S = 60.0


@dataclass(frozen=True)
class Answer:
    """A ping was answered: process `boot_id` lived after `asked_at` (time.monotonic), when the ping was sent."""

    boot_id: str
    asked_at: float


@dataclass(frozen=True)
class _Asked:
    address: str
    at: float


@dataclass(frozen=True)
class _Signs:
    """heard: when the last frame was read. answer: to the latest ping that was answered."""

    heard: float
    answer: Answer | None = None


@dataclass
class Liveness:
    """Signs of life, by process and by address. The control thread takes them in, any thread may ask."""

    _asked: dict[int, _Asked] = field(default_factory=dict)
    """Pings that were not answered yet, by nonce, the oldest first."""
    _boots: dict[str, _Signs] = field(default_factory=dict)
    _addresses: dict[str, _Signs] = field(default_factory=dict)

    def last_heard(self, boot_id: str) -> float | None:
        """When a frame of that process was last read (time.monotonic), or None."""
        signs = self._boots.get(boot_id)
        return None if signs is None else signs.heard

    def last_heard_at(self, address: str) -> float | None:
        """When a frame of whoever calls itself by that address was last read."""
        signs = self._addresses.get(address)
        return None if signs is None else signs.heard

    def alive_after(self, boot_id: str) -> float | None:
        """A time after which that process certainly lived: when it was sent the latest ping that it answered."""
        signs = self._boots.get(boot_id)
        return None if signs is None or signs.answer is None else signs.answer.asked_at

    def answer_at(self, address: str) -> Answer | None:
        """Who answered at that address: to the latest ping that was sent there and answered."""
        signs = self._addresses.get(address)
        return None if signs is None else signs.answer

    def ask(self, address: str) -> Ping:
        """A ping for whoever has that address. Only who gets it knows how to answer it."""
        now = time.monotonic()
        while self._asked and now - next(iter(self._asked.values())).at > _ANSWERED_WITHIN_S:
            del self._asked[next(iter(self._asked))]
        nonce = secrets.randbits(63)
        self._asked[nonce] = _Asked(address, now)
        return Ping(nonce=nonce)

    def heard(self, sender: Peer) -> None:
        """A frame of this process was read."""
        self._boots = _noted(self._boots, sender.boot_id)
        self._addresses = _noted(self._addresses, sender.address)

    def answered(self, sender: Peer, pong: Pong) -> None:
        """This process, which was just heard, answered a ping; one that was never sent, or long ago, proves nothing."""
        asked = self._asked.pop(pong.nonce, None)
        if asked is None:
            return
        answer = Answer(sender.boot_id, asked.at)
        _answer(self._boots, sender.boot_id, answer)
        _answer(self._addresses, asked.address, answer)


def _noted(table: dict[str, _Signs], key: str) -> dict[str, _Signs]:
    """The table with a frame noted; what was silent for long is forgotten when there is much."""
    now = time.monotonic()
    known = table.get(key)
    if known is None and len(table) >= _REMEMBERED:
        table = {other: signs for other, signs in table.items() if now - signs.heard < _FORGOTTEN_AFTER_S}
    table[key] = _Signs(now) if known is None else replace(known, heard=now)
    return table


def _answer(table: dict[str, _Signs], key: str, answer: Answer) -> None:
    """Note an answer, unless a later ping was answered before it came."""
    known = table.get(key)
    if known is None:
        table[key] = _Signs(time.monotonic(), answer)
    elif known.answer is None or known.answer.asked_at <= answer.asked_at:
        table[key] = replace(known, answer=answer)
