"""Shared memory in which each rank of a host writes its status: what it wants, its phase, and why it ended.

A memfd that the ranks inherit from the process that started them: nothing of it stays behind, however they end. Each
rank writes to its own entry only. Numbers are written whole (aligned, 64 bits), so a reader sees the old one or the new
one. What a step depends on is one number of each rank, since two may become visible in another order than they were
written in. Of a group on several hosts each host has a copy: `ReplicatedStatus` keeps them alike.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from base.phase import Phase
from ranks.sealed_socket import FrameRefused, SealedSocket

_ENTRY_BYTES = 1024
_LINE = 8
"""Numbers in a cache line: what a rank writes for every step has a line of its own."""
_POSTS, _BEAT, _ASLEEP, _PHASE, _DONE, _TURNS = 0, *range(_LINE, _LINE + 5)
_TEXT, _CODE, _REPORTED_AT = 2 * _LINE, 2 * _LINE + 1, 2 * _LINE + 2
"""The length of the text that follows, an exit code, and when that was reported (time.monotonic_ns)."""
_TEXT_BYTES = _ENTRY_BYTES - 8 * (_REPORTED_AT + 1)
_BATCH_BITS = 20
_BATCH_MASK = (1 << _BATCH_BITS) - 1


class SharedStatus:
    """The status of each rank of a group."""

    def __init__(self, fd: int, size: int) -> None:
        """fd: of a memfd that `create` returned, for a group of that size."""
        self.size = size
        self._bytes = memoryview(mmap.mmap(fd, size * _ENTRY_BYTES))
        self._numbers = self._bytes.cast("q")
        # Over all ranks, for what is looked at in every turn: min and max of these take a fraction of a microsecond.
        self._posts = tuple(self._of_all(_POSTS + parity) for parity in range(2))
        self._phases = self._of_all(_PHASE)
        self._dones = self._of_all(_DONE)

    @classmethod
    def create(cls, size: int) -> int:
        """The descriptor of an empty one, which the caller owns."""
        fd = os.memfd_create("hisparse-pd-group")
        os.ftruncate(fd, size * _ENTRY_BYTES)
        return fd

    def be_patient(self, seconds: float) -> None:
        """How long ranks of other hosts may be silent from now on. On one host their ends are seen at once."""

    def leave(self) -> None:
        """Tell other hosts nothing more."""

    # What each rank wants of a round. Two posts are kept: a rank may post the next round while others read this one,
    # but none after that, which begins when all have read this one.

    def post(self, rank: int, number: int, batch: int) -> None:
        """Rank `rank` wants to compute that many requests in a round, numbered from 1."""
        self._numbers[self._at(rank, _POSTS + number % 2)] = number << _BATCH_BITS | batch

    def posted(self, rank: int, number: int) -> int | None:
        """What a rank wants in a round; None if it has not said."""
        post = self._posts[number % 2][rank]
        return post & _BATCH_MASK if post >> _BATCH_BITS == number else None

    def anybody_posted(self, number: int) -> bool:
        """Whether any rank has said what it wants in a round."""
        return max(self._posts[number % 2]) >> _BATCH_BITS >= number

    def largest_posted(self, number: int) -> int | None:
        """The most that any rank wants in a round; None until all have said."""
        posts = self._posts[number % 2]
        return max(posts) & _BATCH_MASK if min(posts) >> _BATCH_BITS >= number else None

    # What each rank reports about itself.

    def beat(self, rank: int) -> None:
        """Show that the process runs."""
        self._set(rank, _BEAT, self._get(rank, _BEAT) + 1)

    def beats(self, rank: int) -> int:
        return self._get(rank, _BEAT)

    def turn(self, rank: int) -> None:
        """Show that its loop turns (`Watchdog`)."""
        self._set(rank, _TURNS, self._get(rank, _TURNS) + 1)

    def turns(self, rank: int) -> int:
        """0 until it serves."""
        return self._get(rank, _TURNS)

    def set_asleep(self, rank: int, asleep: bool) -> None:
        """asleep: it does not look whether others have posted, and has to be woken."""
        self._set(rank, _ASLEEP, int(asleep))

    def asleep(self, rank: int) -> bool:
        return bool(self._get(rank, _ASLEEP))

    def set_phase(self, rank: int, phase: Phase) -> None:
        self._set(rank, _PHASE, phase)

    def phase(self) -> Phase:
        """That of the group."""
        return Phase(max(self._phases))

    def phase_of(self, rank: int) -> Phase:
        return Phase(self._get(rank, _PHASE))

    def set_done(self, rank: int) -> None:
        """It will not ask for another step."""
        self._set(rank, _DONE, 1)

    def done(self, rank: int) -> bool:
        return bool(self._get(rank, _DONE))

    def all_done(self) -> bool:
        return all(self._dones)

    # Why a rank ended.

    def report(self, rank: int, text: str, code: int = 1) -> None:
        """Leave the reason why it ends, for the process that started it. The first one counts. code: its exit code."""
        if not self._get(rank, _TEXT):
            data = text.encode()[:_TEXT_BYTES]
            at = 8 * self._at(rank, _REPORTED_AT + 1)
            self._bytes[at : at + len(data)] = data
            self._set(rank, _CODE, code)
            self._set(rank, _REPORTED_AT, time.monotonic_ns())
            self._set(rank, _TEXT, len(data))

    def reported(self, rank: int) -> tuple[str, int] | None:
        """Reason and exit code; None if it does not end, or has not said why."""
        if not (length := self._get(rank, _TEXT)):
            return None
        at = 8 * self._at(rank, _REPORTED_AT + 1)
        return bytes(self._bytes[at : at + length]).decode(errors="replace"), self._get(rank, _CODE)

    def first_reported(self, ranks: Iterable[int]) -> int | None:
        """The rank, of these, that left a reason first: others may have ended because of it. None if there is none."""
        reported = [rank for rank in ranks if self._get(rank, _TEXT)]
        return min(reported, key=lambda rank: self._get(rank, _REPORTED_AT), default=None)

    def _of_all(self, field: int) -> memoryview:
        return self._numbers[field :: _ENTRY_BYTES // 8]

    def _at(self, rank: int, field: int) -> int:
        return rank * (_ENTRY_BYTES // 8) + field

    def _get(self, rank: int, field: int) -> int:
        return self._numbers[self._at(rank, field)]

    def _set(self, rank: int, field: int, value: int) -> None:
        self._numbers[self._at(rank, field)] = value


_MESSAGE = struct.Struct("<3q")
_POST, _STATE, _LEFT = range(3)
_STARTING_S = 600.0
"""How long a rank that starts may be silent: pinning hundreds of GB of host memory may stop all of its threads."""


class ReplicatedStatus(SharedStatus):
    """A SharedStatus of a group on several hosts: each has a copy, and what a rank writes to its own goes to others.

    A rank is connected to its counterpart on every other host (`RankPlace.counterparts`), which writes what it is told
    into its own host's copy. So a rank sends as many messages for a step as there are other hosts. They come in order,
    as readers need them: a post is in the other copy before the next one. It is a connection and not a collective,
    since a sleeping rank is woken by another, and the loss of a host is seen by a thread that waits for nothing else.

    A counterpart that ends, or is silent for longer than its patience, before all are done is reported in its own
    entry, with the reason.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        rank: int,
        links: Mapping[int, SealedSocket],
        called: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        """links: to each counterpart, by its rank. called: another host wants a step that this rank has not come to.
        lost: a counterpart was reported. Both are called on threads of this object."""
        super().__init__(fd, size)
        self._rank = rank
        self._links = links
        self._called = called
        self._lost = lost
        self._sending = threading.Lock()
        """Protects the order of messages: the node's loop posts, and the watch beats."""
        self._closing = False
        self.be_patient(_STARTING_S)
        self._readers = [
            threading.Thread(target=self._read, args=each, name="host-link", daemon=True) for each in links.items()
        ]
        for reader in self._readers:
            reader.start()

    def be_patient(self, seconds: float) -> None:
        """How long a counterpart may be silent from now on; each beats twice a second, or more often."""
        self._patience = seconds
        for link in self._links.values():
            link.be_patient(seconds)

    def leave(self) -> None:
        """End the connections. If all are done, the counterparts do not miss this rank."""
        if self.all_done():
            self._send(_LEFT)
        self._closing = True
        for link in self._links.values():
            link.shut_down()
        for reader in self._readers:
            reader.join()
        for link in self._links.values():
            link.close()

    # What this process's rank writes is sent, too.

    def post(self, rank: int, number: int, batch: int) -> None:
        super().post(rank, number, batch)
        if rank == self._rank:
            self._send(_POST, number, batch)

    def beat(self, rank: int) -> None:
        super().beat(rank)
        self._send_state()

    def _set(self, rank: int, field: int, value: int) -> None:
        changed = rank == self._rank and field in (_PHASE, _DONE) and value != self._get(rank, field)
        super()._set(rank, field, value)
        if changed:
            self._send_state()

    def _send_state(self) -> None:
        self._send(_STATE, self.phase_of(self._rank), int(self.done(self._rank)))

    def _send(self, kind: int, first: int = 0, second: int = 0) -> None:
        message = _MESSAGE.pack(kind, first, second)
        with self._sending:
            for link in self._links.values():
                with suppress(OSError):  # The link's reader finds out.
                    link.send(message)

    # What counterparts report.

    def _read(self, other: int, link: SealedSocket) -> None:
        left = False
        while True:
            try:
                kind, first, second = _MESSAGE.unpack(link.receive())
            except (EOFError, OSError, FrameRefused) as error:
                if not (left or self._closing or self.all_done()):
                    per_host = self.size // (1 + len(self._links))
                    self.report(other, f"rank {other} on host {other // per_host} {self._how_it_ended(error)}")
                    self._lost()
                return
            if kind == _POST:
                super().post(other, first, second)
                if self.posted(self._rank, first) is None:
                    self._called()
            elif kind == _STATE:
                super().beat(other)
                super().set_phase(other, Phase(first))
                if second:
                    super().set_done(other)
            else:
                left = True

    def _how_it_ended(self, error: Exception) -> str:
        match error:
            case EOFError():
                return "closed its connection"
            case BlockingIOError():
                return f"was not heard for {self._patience:g} s"
            case OSError():
                return f"lost its connection ({error.strerror})"
            case _:
                return f"lost its connection ({error})"
