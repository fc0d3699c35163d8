"""The status of a group on several hosts: each host has a copy, and what a rank writes to its own goes to the others.

A rank is connected to its counterpart on every other host (`RankPlace.counterparts`), which writes what it is told into
the copy of its own host. So a rank sends as many messages for a step as there are other hosts, and everything that
reads the status (step barrier, watch) is the same on one host and on several. What a rank sends comes in order, as
readers need it: a post is in the other copy before the next one.

A connection and not a collective, since a sleeping rank is woken by what another one does on its own, and the end of a
rank, or the loss of its host, is seen by a thread that waits for nothing else.
"""

import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from base.phase import Phase
from ranks.place import RankPlace
from ranks.sealed_socket import FrameRefused, SealedSocket
from ranks.status import SharedStatus

_MESSAGE = struct.Struct("<3q")
_POST, _STATE, _LEFT = range(3)
_STARTING_S = 600.0
"""How long a rank that starts may be silent: pinning hundreds of GB of host memory may stop all of its threads."""


class ReplicatedStatus(SharedStatus):
    """A SharedStatus whose entry of this rank is copied to all hosts.

    A counterpart that ends, or is silent for longer than its patience, before all are done is reported in its own
    entry, with the reason.
    """

    def __init__(
        self,
        fd: int,
        place: RankPlace,
        links: Mapping[int, SealedSocket],
        called: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        """links: to each counterpart, by its rank. called: another host wants a step that this rank has not come to.
        lost: a counterpart was reported. Both are called on threads of this object."""
        super().__init__(fd, place.size)
        self._place = place
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
        if rank == self._place.rank:
            self._send(_POST, number, batch)

    def beat(self, rank: int) -> None:
        super().beat(rank)
        self._send_state()

    def set_phase(self, rank: int, phase: Phase) -> None:
        before = self.phase_of(rank)
        super().set_phase(rank, phase)
        if phase != before:
            self._send_state()

    def set_done(self, rank: int) -> None:
        before = self.done(rank)
        super().set_done(rank)
        if not before:
            self._send_state()

    def _send_state(self) -> None:
        self._send(_STATE, self.phase_of(self._place.rank), int(self.done(self._place.rank)))

    def _send(self, kind: int, first: int = 0, second: int = 0) -> None:
        message = _MESSAGE.pack(kind, first, second)
        with self._sending:
            for link in self._links.values():
                with suppress(OSError):  # The link's reader finds out.
                    link.send(message)

    # What counterparts say of theirs.

    def _read(self, other: int, link: SealedSocket) -> None:
        left = False
        while True:
            try:
                kind, first, second = _MESSAGE.unpack(link.receive())
            except (EOFError, OSError, FrameRefused) as error:
                if not (left or self._closing or self.all_done()):
                    how = self._how_it_ended(error)
                    self.report(other, f"rank {other} on host {other // self._place.per_host} {how}")
                    self._lost()
                return
            if kind == _POST:
                super().post(other, first, second)
                if self.posted(self._place.rank, first) is None:
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
