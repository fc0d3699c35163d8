"""A service that computes nothing, and remembers whole blocks of what it was asked and what it answered."""

from typing import Any

import numpy as np

from base.block_hashes import block_hashes
from benchmarks.prefix.policies import IdealCache
from benchmarks.serving.stub import Reply, token_event, usage_event

Json = dict[str, Any]


class CachingStub:
    """asked: what it was asked, in order. answers: the token ids of its answers."""

    def __init__(self) -> None:
        self.asked: list[Json] = []
        self.answers: list[list[int]] = []
        self._cache = IdealCache()

    async def answer(self, request: Json, reply: Reply) -> None:
        prompt, first = request["prompt"], 7 * len(self.asked)
        token_ids = [(first + number) % 256 for number in range(request["max_tokens"])]
        self.asked.append(request)
        self.answers.append(token_ids)
        cached = self._cache.find(blocks(prompt))
        self._cache.add(blocks([*prompt, *token_ids[:-1]]))
        reply.start()
        for token_id in token_ids:
            reply.event(token_event(token_ids=[token_id]))
        reply.event(usage_event(len(prompt), len(token_ids), cached))
        reply.event("[DONE]")
        reply.end()


def blocks(token_ids: list[int]) -> list[int]:
    return list(block_hashes(np.array(token_ids, dtype=np.int32)).tolist())
