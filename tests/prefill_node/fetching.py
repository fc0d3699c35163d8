"""A prefill node whose decode node has the KV of a prefix, for tests of fetches."""

import threading
from typing import Any

import torch

from control.messages import AttemptId, FetchGrant, FetchRequest
from kvcache.page_cache import PageCache
from prefill_node.attempt import HeldState
from prefill_node.config import FetchPolicy
from tests.prefill_node.world import LiveWorld, new_cache, states_of
from transfer.checksum import GROUP_POSITIONS, digests
from transfer.memory import Checksums
from transfer.planner import expand_extents

FIRST = [(7 * i + i // 10) % 100 for i in range(200)]
PREFIX = 128
LENT = ((300, 20), (20, 80), (500, 28))
"""Slots at the decode node of the first 128 positions."""
SENT_TO = ((700, 40), (103, 40))
"""Slots that prompts are sent to: none of a prefix, which the decode node would not lend while they are written."""


class Held(threading.Event):
    """Says when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


class Fetching(LiveWorld):
    """A prefill node whose decode node has the KV of the first 128 tokens of FIRST."""

    digested_together = GROUP_POSITIONS

    def __init__(
        self,
        fetch_policy: FetchPolicy = "always",
        world_size: int = 1,
        cache: PageCache | None = None,
        **of_model: Any,
    ) -> None:
        super().__init__(cache or new_cache(48), fetch_policy=fetch_policy, world_size=world_size, **of_model)
        self.lend()

    def lend(self) -> None:
        states = torch.tensor(states_of(FIRST)[:PREFIX], dtype=torch.uint8)
        for layer, added in zip(self.slots.layers, (0, 1, 0), strict=True):
            layer[expand_extents(LENT)] = (states + added)[:, None]

    def ask_fetching(self, length: int = 200, start: int = PREFIX) -> tuple[AttemptId, FetchRequest]:
        attempt = self.ask(FIRST[:length], start, SENT_TO)
        return attempt, self.until(FetchRequest, attempt)

    def ask_and_grant(self) -> AttemptId:
        attempt, asked = self.ask_fetching()
        self.answer(asked)
        return attempt

    def answer(self, asked: FetchRequest, **changes: Any) -> None:
        """With a grant, but for what is changed of it."""
        self.planner.fetch_answered(self.grant(asked).model_copy(update=changes))

    def until_missing(self, attempt: AttemptId, *ranks: int) -> None:
        """Until all ranks but these have read what they read of a prefix."""
        fetch = self.held[attempt].fetch
        assert fetch is not None
        transfer = self.planner._dispatch._transfers[fetch.work or 0]
        self.turn_until(lambda: transfer.missing == set(ranks))

    def grant(self, asked: FetchRequest) -> FetchGrant:
        slots, each = expand_extents(LENT)[asked.start : asked.stop], self.digested_together
        groups = [(first, slots[first : first + each]) for first in range(0, len(slots), each)]
        buffers = self.slots.destination.buffers
        found = [one for first, group in groups for one in digests(buffers, group, asked.start + first)]
        extents = tuple((int(slot), 1) for slot in slots)
        return FetchGrant(
            attempt=asked.attempt,
            start=asked.start,
            stop=asked.stop,
            extents=extents,
            checksums=Checksums.of(found),
        )

    def ask_another(self) -> AttemptId:
        """A prompt of 40 tokens that shares nothing."""
        return self.ask([9] * 40, 0, ((800, 40),))

    def check_sent(self, length: int = 200) -> None:
        """What was sent is the KV of the tokens behind the prefix, which depends on the KV of the prefix."""
        slots = expand_extents(SENT_TO)[: length - PREFIX]
        states = torch.tensor(states_of(FIRST)[PREFIX:length], dtype=torch.uint8)
        for layer, added in zip(self.slots.layers, (0, 1, 0), strict=True):
            assert torch.equal(layer[slots], (states + added)[:, None].expand(-1, layer.shape[1]))

    def finish(self, attempt: AttemptId, computed: int, length: int = 200) -> None:
        """The prompt is prefilled as always, with so many tokens computed."""
        done = self.done(attempt)
        self.check_sent(length)
        self.release(attempt)
        assert self.model.tokens == computed
        assert done.cached_tokens == length - computed
        self.cache.check_idle()
        assert self.metric("requests", state="fetching") == 0

    def failures(self, reason: str) -> float:
        return self.metric("prefix_fetch_failures_total", reason=reason)


class GroupFetching(Fetching):
    """Three ranks that lack what their decode node has. It hashes 24 positions together, so the last group has 8."""

    digested_together = 24

    def __init__(self) -> None:
        super().__init__(world_size=3)

    @property
    def bytes_read(self) -> list[int]:
        """By each rank."""
        return [sum(int(batch.lengths.sum()) for batch in rank.reads.posted) for rank in self.all]

    def reading_seconds(self, attempt: AttemptId) -> float:
        fetch = self.held[attempt].fetch
        assert fetch is not None
        assert fetch.report is not None
        return fetch.report.seconds()

    def read_during_a_step(self) -> tuple[AttemptId, AttemptId]:
        """All ranks have read their blocks and wait for a step that `hold` holds. Its attempt, and the reader."""
        self.model.before_pass = self.hold.wait
        computing = self.ask_another()
        self.turn_until(lambda: not self.planner._steps.is_idle)
        reading = self.ask_and_grant()
        self.turn_until(lambda: self.held[reading].state is HeldState.READ)
        return computing, reading
