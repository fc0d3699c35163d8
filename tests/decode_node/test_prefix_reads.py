"""A decode node lends cached prefixes to prefill nodes that read them, and keeps them until nobody reads any more."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from control.liveness import AnsweredPing
from control.messages import (
    Abort,
    FetchDone,
    FetchGrant,
    FetchRefused,
    FetchRequest,
    NotHeld,
    Peer,
    PrefillAccepted,
    PrefillDone,
    PrefillFailed,
    Quiesced,
)
from decode_node.prefill_nodes import SILENCE_S
from decode_node.quarantine import Quarantine
from decode_node.remote_prefill import PrefillMessage
from decode_node.request import Request, RequestState
from decode_node.verifier import Digesting
from kvcache.extents import NO_SLOTS, Extent, HostSlots
from tests.decode_node.remote_world import FIRST, SECOND, SLOTS, Clock, R, RemoteWorld
from tests.decode_node.world import GATEWAY
from transfer.memory import Checksum, Checksums

PREFIX = HostSlots((Extent(20, 40), Extent(70, 24)))
"""Of 64 cached positions."""
ASK = FetchRequest(attempt=R, start=30, stop=64)
DIGESTS = Checksums.of([Checksum(0, 30, 64, 1), Checksum(1, 30, 64, 2), Checksum(2, 30, 64, 3)])


class Lending(RemoteWorld):
    """A prefill node was asked for three tokens behind a cached prefix."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.lent: list[HostSlots] = []
        self.host.prefixes = self
        generate = self.request.generate.model_copy(update={"prompt_ids": tuple(range(68))})
        self.request = Request(generate, self.request.gateway, host_slots=PREFIX)
        self.dispatch()
        self.remote.take(FIRST, PrefillAccepted(attempt=R))
        self.control.sent.clear()

    def hold(self, token_ids: npt.NDArray[np.int32], salt: str) -> HostSlots:
        """Whole blocks only, as the cache has them."""
        if len(token_ids) < 64:
            return NO_SLOTS
        self.lent.append(PREFIX)
        return PREFIX

    @property
    def returned(self) -> list[HostSlots]:
        return [slots for slots in self.host.freed if slots == PREFIX]

    @property
    def freed_slots(self) -> list[HostSlots]:
        return [slots for slots in self.host.freed if slots == SLOTS]

    def ask(self, message: FetchRequest = ASK) -> None:
        self.remote.take(FIRST, message)

    def lend(self) -> None:
        self.ask()
        self.digested()

    def digested(self, error: str | None = None) -> None:
        [task] = self.verifier.waiting
        assert isinstance(task, Digesting)
        self.verifier.waiting.clear()
        self.remote.reads.digested(replace(task, digests=Checksums() if error else DIGESTS, error=error))

    def grants(self) -> list[FetchGrant]:
        return [message for message in self.control.take(FetchGrant) if isinstance(message, FetchGrant)]

    def refusal(self) -> str:
        [refused] = self.control.take(FetchRefused)
        assert isinstance(refused, FetchRefused)
        return refused.reason


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> Lending:
    return Lending(Clock(monkeypatch))


def test_slots_are_lent_before_they_are_hashed_and_named(h: Lending) -> None:
    for _ in range(2):
        h.ask()
        assert (h.lent, h.grants()) == ([PREFIX], []), "a node that asks again gets one loan"
    [task] = h.verifier.waiting
    assert isinstance(task, Digesting)
    assert np.array_equal(task.slots, PREFIX.slots()[30:])
    h.digested()
    grant = FetchGrant(attempt=R, start=30, stop=64, extents=((50, 10), (70, 24)), checksums=DIGESTS)
    assert h.grants() == [grant]
    h.ask()
    assert h.grants() == [grant], "the node has not heard it and asks again"
    assert (h.lent, h.returned, h.verifier.waiting) == ([PREFIX], [], [])
    assert not h.remote.is_idle


@pytest.mark.parametrize(
    "last",
    [
        FetchDone(attempt=R),
        PrefillDone(attempt=R, num_tokens=67),
        Quiesced(attempt=R),
        NotHeld(attempts=(R,)),
        PrefillFailed(attempt=R, reason="out of memory"),
    ],
)
@pytest.mark.parametrize("is_aborted", [False, True])
def test_whatever_says_that_nothing_is_in_flight_gives_the_slots_back(
    h: Lending, last: PrefillMessage, is_aborted: bool
) -> None:
    h.lend()
    if is_aborted:
        h.remote.abandon(h.request)
        assert h.control.repeated["abort", R] == (FIRST, Abort(attempt=R))
    h.remote.take(FIRST, PrefillFailed(attempt=R, reason="reading", in_flight=True))
    h.remote.take(SECOND, last)
    assert h.returned == [], "not while it is being read, nor at the word of another node"
    h.remote.take(FIRST, last)
    assert h.returned == [PREFIX]
    h.remote.take(FIRST, last)
    assert h.returned == [PREFIX]


def test_an_attempt_reads_once_and_only_what_is_there(h: Lending) -> None:
    for start, stop, reason in ((0, 65, "only 64 positions are here"), (0, 63, "whole blocks")):
        h.ask(FetchRequest(attempt=R, start=start, stop=stop))
        assert reason in h.refusal()
    h.remote.take(SECOND, ASK)
    assert not h.control.sent, "it is another node's attempt"
    h.lend()
    h.remote.take(FIRST, FetchDone(attempt=R))
    h.control.sent.clear()
    h.ask()
    assert "reads once" in h.refusal(), "one that was late on the way must not open a loan that nobody ends"
    h.remote.abandon(h.request)
    h.ask()
    assert "is over" in h.refusal()
    assert h.lent == h.returned == [PREFIX]
    h.remote.take(FIRST, Quiesced(attempt=R))
    assert h.freed_slots == [SLOTS]
    assert h.remote.is_idle


@pytest.mark.parametrize("has_come_back", [True, False])
def test_what_is_not_wanted_any_more_when_it_is_hashed_is_not_granted(h: Lending, has_come_back: bool) -> None:
    h.ask()
    if has_come_back:
        h.remote.take(FIRST, FetchDone(attempt=R))
    else:
        h.remote.abandon(h.request)
    h.digested()
    h.ask()
    assert h.grants() == []
    assert h.returned == ([PREFIX] if has_come_back else []), "the reader has to say so"


def test_what_cannot_be_hashed_is_refused(h: Lending) -> None:
    h.verifier.room = 0
    h.ask()
    assert h.lent == h.returned == [PREFIX], "the verifier is busy: the node asks again"
    assert not h.control.sent
    h.verifier.room = 1
    h.ask()
    h.digested("a bug")
    assert "a bug" in h.refusal()
    assert h.returned == [PREFIX, PREFIX]


def test_slots_of_a_reader_are_free_once_it_is_proved_dead(h: Lending) -> None:
    h.lend()
    h.control.heard[FIRST.boot_id] = h.clock.now
    h.tick(h.clock.now)
    assert FIRST in h.control.watched
    h.remote.abandon(h.request)
    h.clock.now += SILENCE_S + 1
    h.control.answers[FIRST.address] = AnsweredPing("another", h.clock.now - SILENCE_S)
    h.tick(h.clock.now)
    assert h.returned == [], "that ping was sent when the reader had been heard just before"
    h.control.answers[FIRST.address] = AnsweredPing("another", h.clock.now)
    h.tick(h.clock.now + 1)
    assert h.returned == [PREFIX]
    assert h.freed_slots == [], "what it could write to has a grace"


def test_an_operator_sees_what_is_read_for_nobody_and_can_evict_it(h: Lending) -> None:
    quarantine = h.remote.quarantine
    h.lend()
    assert quarantine.list().reservations == [], "a request wants it"
    h.remote.abandon(h.request)
    assert [(r.access, r.slots, r.boot_id) for r in quarantine.list().reservations] == [
        ("writes", 3, "first"),
        ("reads", 64, "first"),
    ]
    eviction = quarantine.evict("first")
    assert (eviction.reservations, eviction.slots) == (2, 67)
    assert h.returned == [PREFIX]
    assert [r.access for r in quarantine.list().reservations] == ["writes"]


RANK = Peer(role="prefill", address="127.0.0.1:12", boot_id="rank")


def lend_to_a_group(h: Lending) -> Quarantine:
    """To the attempt of a node of two ranks, which is over."""
    h.remote.abandon(h.request)
    h.remote.take(FIRST, Quiesced(attempt=R))
    h.remote.nodes.learn(GATEWAY.address, (FIRST, SECOND), {}, {"first": (RANK,)})
    h.request.move(RequestState.WAITING)
    h.dispatch()
    attempt = R._replace(epoch=2)
    h.remote.take(FIRST, PrefillAccepted(attempt=attempt))
    h.ask(ASK.model_copy(update={"attempt": attempt}))
    h.digested()
    h.remote.abandon(h.request)
    h.host.freed.clear()
    return h.remote.quarantine


def prove_dead(h: Lending, reader: Peer) -> None:
    h.clock.now += 1
    h.control.answers[reader.address] = AnsweredPing("another", h.clock.now)
    h.clock.now += 1
    h.tick(h.clock.now)


@pytest.mark.parametrize("order", [(FIRST, RANK), (RANK, FIRST)])
def test_a_loan_to_several_ranks_ends_with_the_proved_death_of_all(h: Lending, order: tuple[Peer, Peer]) -> None:
    """The node has divided the reads among them, and one may have been left behind."""
    quarantine = lend_to_a_group(h)
    h.clock.now += 2
    h.tick(h.clock.now)
    assert {FIRST, RANK} <= h.control.watched
    first, last = order
    prove_dead(h, first)
    assert h.returned == []
    assert [r.boot_id for r in quarantine.list().reservations if r.access == "reads"] == [last.boot_id]
    prove_dead(h, last)
    assert h.returned == [PREFIX]


def test_a_loan_to_several_ranks_ends_when_the_node_says_so(h: Lending) -> None:
    lend_to_a_group(h)
    h.remote.take(RANK, Quiesced(attempt=R._replace(epoch=2)))
    assert h.returned == []
    h.remote.take(FIRST, Quiesced(attempt=R._replace(epoch=2)))
    assert h.returned == [PREFIX]


def test_an_operator_evicts_each_rank_that_may_read(h: Lending) -> None:
    quarantine = lend_to_a_group(h)
    assert quarantine.evict("first").also_read_by == ["rank"]
    assert h.returned == []
    assert quarantine.evict("rank").also_read_by == []
    assert h.returned == [PREFIX]


def test_lending_is_refused_by_a_node_that_keeps_nothing(h: Lending) -> None:
    h.host.prefixes = None
    h.ask()
    assert "only 0 positions" in h.refusal()
