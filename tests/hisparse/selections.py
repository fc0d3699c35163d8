"""Selections as adversaries make them: repeated, with gaps, recent or from anywhere."""

import random


def select(rng: random.Random, newest: int, k: int, hot_size: int) -> list[int]:
    """Of one query, up to the newest position, which may be among them."""
    span = rng.choice([newest + 1, min(newest + 1, hot_size + 2), min(newest + 1, 3 * hot_size)])
    low = rng.choice([0, newest + 1 - span])
    distinct = rng.random() < 0.5 and span >= k
    chosen = rng.sample(range(low, low + span), k) if distinct else [low + rng.randrange(span) for _ in range(k)]
    if rng.random() < 0.3:
        chosen[rng.randrange(k)] = newest
    gaps = rng.choice([0.0, 0.0, 0.2, 0.9, 1.0])
    return [-1 if rng.random() < gaps else position for position in chosen]


def select_by_queries(
    rng: random.Random, first: int, queries: int, k: int, hot_size: int, different: bool
) -> list[list[int]]:
    """As consecutive tokens do: mostly what the query before selected, and each up to its own position. All different
    if that is asked for and there are as many positions."""
    if different and first >= queries * k:
        positions = rng.sample(range(first), queries * k)
        return [positions[i * k : (i + 1) * k] for i in range(queries)]
    selected = [select(rng, first, k, hot_size)]
    drift = rng.choice([0.0, 0.05, 0.3, 1.0])
    for last in range(first + 1, first + queries):
        new = select(rng, last, k, hot_size)
        selected.append([n if rng.random() < drift else o for o, n in zip(selected[-1], new, strict=True)])
    return selected
