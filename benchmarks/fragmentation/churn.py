"""A trace of what requests ask of a pool of slots: made once, so that every allocator is asked the same."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count

import numpy as np

from hisparse.coordinator import HOST_GRANULE

PREFILL_TOKENS_PER_S = 20_000.0
DECODE_TOKENS_PER_S = 25.0
ABORTED = 0.05
"""Part of the requests that end early, at any point of their lives."""

PROMPTS = ((0.50, 256, 4096), (0.35, 4096, 32768), (0.15, 32768, 131072))
"""Part of the requests, shortest and longest prompt, log-uniform between them: chats, documents, long contexts."""
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _LONGEST_OUTPUT = 400, 0.9, 8192


class Kind(Enum):
    RESERVE = "reserve"
    GROW = "grow"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Event:
    """At `seconds`, a request reserves `count` slots for its prompt, grows by `count`, or releases all that it has."""

    seconds: float
    kind: Kind
    request: int
    count: int = 0


@dataclass(frozen=True)
class Load:
    """More requests always wait than fit: the next is taken as soon as it leaves the pool at most `occupancy` full."""

    num_slots: int = 1 << 20
    occupancy: float = 0.85
    hours: float = 4.0
    seed: int = 0


def trace(load: Load) -> Iterator[Event]:
    """The events of a pool's life, in order. They follow from counts alone: where slots lie decides nothing here."""
    rng = np.random.default_rng(load.seed)
    prompts = chain.from_iterable(iter(lambda: _draw_prompts(rng, load.num_slots), None))
    numbers = count()
    held: dict[int, int] = {}
    due: list[tuple[float, int, Kind]] = []
    now, used = 0.0, 0
    waiting = next(prompts)
    while now < load.hours * 3600:
        while used + waiting <= load.occupancy * load.num_slots:
            request = next(numbers)
            held[request] = waiting
            used += waiting
            yield Event(now, Kind.RESERVE, request, waiting)
            for event in _life(rng, now, waiting):
                heapq.heappush(due, (event[0], request, event[1]))
            waiting = next(prompts)
        now, request, kind = heapq.heappop(due)
        if request not in held:
            continue
        if kind is Kind.GROW and used + HOST_GRANULE <= load.num_slots:
            held[request] += HOST_GRANULE
            used += HOST_GRANULE
            yield Event(now, Kind.GROW, request, HOST_GRANULE)
        else:
            # At its end, or because the pool is full: then it would come again later, like any other.
            used -= held.pop(request)
            yield Event(now, Kind.RELEASE, request)


def _draw_prompts(rng: np.random.Generator, num_slots: int, number: int = 1000) -> list[int]:
    """Lengths of prompts, none longer than a quarter of the pool."""
    parts, shortest, longest = (np.array(column) for column in zip(*PROMPTS, strict=True))
    kind = rng.choice(len(parts), size=number, p=parts)
    lengths = np.exp(rng.uniform(np.log(shortest[kind]), np.log(longest[kind])))
    return [int(length) for length in np.minimum(lengths, num_slots // 4)]


def _life(rng: np.random.Generator, now: float, prompt: int) -> list[tuple[float, Kind]]:
    """What a request does after its reservation: it grows by a granule at a time as it decodes, and ends."""
    output = min(_LONGEST_OUTPUT, 1 + int(rng.lognormal(np.log(_OUTPUT_MEDIAN), _OUTPUT_SIGMA)))
    first_token = now + prompt / PREFILL_TOKENS_PER_S
    end = first_token + output / DECODE_TOKENS_PER_S
    if rng.random() < ABORTED:
        end = now + (end - now) * rng.random()
    growth = first_token + np.arange(0, output, HOST_GRANULE) / DECODE_TOKENS_PER_S
    return [*((float(at), Kind.GROW) for at in growth if at < end), (end, Kind.RELEASE)]
