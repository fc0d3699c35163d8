"""How much of the prompts a service had cached, beside what an ideal cache of the same requests would have had."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from base.block_hashes import block_hashes
from benchmarks.prefix.policies import IdealCache
from benchmarks.serving.client import Outcome
from benchmarks.serving.measure import PointResult


@dataclass(frozen=True)
class PrefixHits:
    """Tokens of the prompts of a load point that were answered.

    cached: of `told` tokens, which are those of prompts whose answer says how much of them was cached; unknown: answers
    that do not say. ideal: of `sent` tokens, which are those of all that were answered, found by a cache that keeps
    every whole block: prompts from the moment when they are sent, answers from their end on.
    """

    told: int
    cached: int
    unknown: int
    sent: int
    ideal: int

    @classmethod
    def of(cls, result: PointResult, cache: IdealCache) -> "PrefixHits":
        """cache: what the requests before these leave; these are added to it."""
        play(result.ahead, cache)
        ideal = play(result.outcomes, cache)
        answered = [outcome for outcome in result.outcomes if outcome.failure is None]
        said = [usage for outcome in answered if (usage := outcome.usage) and usage.cached_tokens is not None]
        return cls(
            told=sum(usage.prompt_tokens for usage in said),
            cached=sum(usage.cached_tokens or 0 for usage in said),
            unknown=len(answered) - len(said),
            sent=sum(outcome.request.input_tokens or 0 for outcome in answered),
            ideal=ideal,
        )

    @property
    def rate(self) -> float | None:
        """None if no answer says."""
        return self.cached / self.told if self.told else None

    @property
    def ideal_rate(self) -> float | None:
        """None if nothing was answered."""
        return self.ideal / self.sent if self.sent else None


def play(outcomes: Sequence[Outcome], cache: IdealCache) -> int:
    """Tokens of the prompts that the cache finds when they are sent. Requests that failed are left out."""
    times: list[tuple[float, Outcome, bool]] = []
    for outcome in outcomes:
        if outcome.failure is None:
            times += [(outcome.started, outcome, False), (outcome.ended, outcome, True)]
    found = 0
    for _, outcome, is_end in sorted(times, key=lambda time: time[0]):
        prompt = outcome.request.token_ids
        if prompt is None:
            continue
        if is_end:
            # Of the last token nobody computes KV.
            cache.add(_blocks(np.concatenate([prompt, np.array(outcome.token_ids[:-1], dtype=np.int32)])))
        else:
            blocks = _blocks(prompt)
            found += cache.find(blocks)
            cache.add(blocks)
    return found


def _blocks(tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> list[int]:
    """A number for each whole block, equal for equal blocks behind equal ones."""
    return list(block_hashes(tokens).tolist())
