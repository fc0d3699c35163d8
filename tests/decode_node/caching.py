"""A scheduler harness with a prefix cache."""

import random

import torch

from control.messages import PrefillRequest
from decode_node.request import RequestState
from kvcache.prefix_cache import PrefixCache
from tests.decode_node.scheduler_harness import FORMAT, Harness


class Caching(Harness):
    """A harness with a prefix cache, which looks at every byte of the KV that requests have, in every turn."""

    def __init__(self, **options: object) -> None:
        super().__init__(caching=True, **options)  # type: ignore[arg-type]
        self.asked: list[PrefillRequest] = []
        self.max_cached = 0

    @property
    def cache(self) -> PrefixCache:
        cache = self.coordinator.host.prefixes
        assert cache is not None
        return cache

    def turn(self) -> None:
        super().turn()
        for _, message in self.control.repeated.values():
            if isinstance(message, PrefillRequest) and message not in self.asked:
                self.asked.append(message)
        self.max_cached = max(self.max_cached, self.cache.cached_slots)
        self.audit()

    def audit(self) -> None:
        """What a request will read is the KV of its own tokens; and the books add up."""
        host = self.coordinator.host
        host.check_integrity()
        self.cache.check_integrity()
        for request in self.scheduler.requests.values():
            slots = request.host_slots
            if request.state is RequestState.RUNNING:
                slots = self.coordinator._running[request.request_id].host_slots
            if slots is None or request.state is RequestState.LOCAL_PREFILL:
                continue
            known = len(slots) if request.state is RequestState.PREFILLING else request.kv_tokens
            tokens = torch.tensor(request.tokens[:known])
            pairs = torch.stack((tokens, torch.arange(known)), 1)
            at = torch.from_numpy(slots.slots()[:known])
            assert torch.equal(host.kv[0][at], FORMAT.encode_items(pairs)), (request.request_id, request.state)
            assert torch.equal(host.index_keys[0][at], FORMAT.encode_index_keys(pairs))

    def run(self, turns: int = 2000) -> None:
        super().run(turns)
        assert self.coordinator.host.used == 0
        self.cache.check_integrity()
        self.cache.clear()
        self.scheduler.check_idle()
        assert self.coordinator.host.free == self.coordinator.host.num_slots
        assert self.coordinator.host.cached == self.cache.cached_slots == 0

    def drain(self) -> None:
        """Until there are no requests; the cache stays."""
        while self.scheduler.requests or self.scheduler.holds_something:
            self.turn()

    def sent(self, request_id: str) -> list[tuple[int, int]]:
        """From which position on, and how many, for each attempt of a request."""
        return [
            (message.start, len(message.token_ids) - message.start)
            for message in self.asked
            if message.attempt.request_id == request_id
        ]

    def count(self, metric: str) -> int:
        return int(getattr(self.metrics, metric).labels("decode")._value.get())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens below 100, so that answers of a few hundred tokens stay in the vocabulary."""
    return tuple(random.Random(seed).randrange(100) for _ in range(length))
