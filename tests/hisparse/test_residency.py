"""The replacement policy against a plain sequential reading of it."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.residency import Residency

CONTEXT = 40


@dataclass
class SequentialClock:
    """One row in one index layer, as the module docstring of `hisparse.residency` has it, one hot index at a time."""

    size: int
    window: int = 1
    position_at: list[int] = field(default_factory=list)
    referenced: list[bool] = field(default_factory=list)
    hand: int = 0

    def __post_init__(self) -> None:
        self.position_at = [-1] * self.size
        self.referenced = [False] * self.size

    def reset_short(self) -> None:
        self.position_at = [p if p <= self.size - self.window else -1 for p in range(self.size)]

    def resolve(self, queries: list[list[int]], newest: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Hot index of every position of each uncut query, and the misses with their victims in order."""
        if newest + self.window <= self.size:
            return queries, []
        uncut = self._uncut(queries, newest)
        resident = {p: hot for hot, p in enumerate(self.position_at) if p >= 0}
        protected = set()
        misses: list[int] = []
        for position in (p for query in uncut for p in query if 0 <= p < newest):
            if position in resident:
                protected.add(resident[position])
                self.referenced[resident[position]] = True
            elif position not in misses:
                misses.append(position)
        victims = self._victims(len(misses), protected)
        for position, victim in zip(misses, victims, strict=True):
            self.position_at[victim] = position
        hot = {p: hot for hot, p in enumerate(self.position_at) if p >= 0}
        hot |= {newest + i: self.size + i for i in range(self.window)} | {-1: -1}
        return [[hot[p] for p in query] for query in uncut], list(zip(misses, victims, strict=True))

    def _uncut(self, queries: list[list[int]], newest: int) -> list[list[int]]:
        asked: set[int] = set()
        for j, query in enumerate(queries):
            asked |= {p for p in query if 0 <= p < newest}
            if len(asked) > self.size:
                assert j > 0, "one query fits"
                return queries[:j]
        return queries

    def _victims(self, count: int, protected: set[int]) -> list[int]:
        victims: list[int] = []
        at, steps = self.hand, 0
        while len(victims) < count:
            assert steps < 2 * self.size, "victims must suffice within two revolutions"
            if at not in protected and at not in victims:
                if self.referenced[at]:
                    self.referenced[at] = False
                else:
                    victims.append(at)
            at, steps = (at + 1) % self.size, steps + 1
        if count:
            self.hand = at
        return victims


def state_of(residency: Residency, layer: int, row: int) -> tuple[list[int], list[bool], int]:
    return (
        residency.position_at[layer, row].tolist(),
        residency.referenced[layer, row].tolist(),
        int(residency.hand[layer, row]),
    )


def check_step(
    residency: Residency,
    references: dict[tuple[int, int], SequentialClock],
    layer: int,
    rows: list[int],
    positions: list[list[list[int]]],
    newest: list[int],
    valid: list[int] | None = None,
) -> list[int]:
    """Resolve by both. positions: per row and query; of each row, the first `valid` are queries. Returns how many are
    not cut."""
    valid = valid or [len(queries) for queries in positions]
    asked = [queries[:count] for queries, count in zip(positions, valid, strict=True)]
    resident_before = {row: set(references[layer, row].position_at) for row in rows}
    plan = residency.resolve(
        layer, torch.tensor(rows), torch.tensor(positions), torch.tensor(newest), torch.tensor(valid)
    )
    misses = list(zip(plan.miss_batch.tolist(), plan.miss_positions.tolist(), plan.miss_hot.tolist(), strict=True))
    expected_misses, entries = [], 0
    for b, row in enumerate(rows):
        reference = references[layer, row]
        hot, row_misses = reference.resolve(asked[b], newest[b])
        none = [[-1] * len(positions[b][0])] * (len(positions[b]) - len(hot))
        assert plan.hot[b].tolist() == [*hot, *none]
        assert int(plan.valid[b]) == len(hot)
        expected_misses += [(b, position, victim) for position, victim in row_misses]
        uncut = {p for query in asked[b][: len(hot)] for p in query if p >= 0}
        entries += sum(p >= 0 for query in asked[b][: len(hot)] for p in query)
        assert state_of(residency, layer, row) == (reference.position_at, reference.referenced, reference.hand)
        is_short = newest[b] + reference.window <= reference.size
        assert is_short or resident_before[row] & uncut <= set(reference.position_at), "a hit was evicted"
        inverse = {p: h for h, p in enumerate(reference.position_at) if p >= 0}
        found = residency.lookup(layer, torch.tensor([row]), torch.arange(CONTEXT)[None])
        assert found[0].tolist() == [inverse.get(p, -1) for p in range(CONTEXT)]
    assert misses == expected_misses
    assert plan.misses == len(expected_misses)
    assert plan.hits == entries - len(expected_misses)
    return plan.valid.tolist()


def fresh(
    size: int, layers: int = 1, rows: int = 1, window: int = 1
) -> tuple[Residency, dict[tuple[int, int], SequentialClock]]:
    residency = Residency(layers, rows, CONTEXT, size, torch.device("cpu"), window)
    return residency, {(layer, row): SequentialClock(size, window) for layer in range(layers) for row in range(rows)}


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[list[int]], int, int]]]:
    """A size, a window, and steps: positions per query, newest, and how many of the queries exist."""
    size, window = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 4, 6]))
    k = draw(st.integers(1, size))
    newest = draw(st.integers(0, 16))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        if newest + window > CONTEXT:
            break
        first = draw(st.integers(newest, newest + window - 1))
        width = draw(st.integers(1, min(4, newest + window - first)))
        queries = [draw(st.lists(st.integers(-1, first + j), min_size=k, max_size=k)) for j in range(width)]
        steps.append((queries, newest, draw(st.integers(1, width))))
        newest += draw(st.integers(1, width))
    return size, window, steps


@settings(max_examples=300)
@given(walks())
def test_one_row_follows_the_sequential_policy(walk: tuple[int, int, list[tuple[list[list[int]], int, int]]]) -> None:
    size, window, steps = walk
    residency, references = fresh(size, window=window)
    if steps[0][1] <= size + 1 - window:
        residency.reset_short(0)
        references[0, 0].reset_short()
    for queries, newest, valid in steps:
        check_step(residency, references, 0, [0], [queries], [newest], [valid])


@pytest.mark.parametrize("most_queries", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_batches_follow_the_sequential_policy_over_thousands_of_steps(seed: int, most_queries: int) -> None:
    rng = random.Random(seed)
    size, k, layers, num_rows, window = 8, rng.choice([3, 5, 8]), 2, 5, most_queries
    residency, references = fresh(size, layers, num_rows, window)
    newest = {row: rng.randrange(size + 1, CONTEXT - window) for row in range(num_rows)}
    cut = 0
    for _ in range(1500):
        layer = rng.randrange(layers)
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        queries = rng.randint(1, most_queries)
        span = rng.choice([size, size + 1, CONTEXT])

        def position(row: int, query: int, span: int = span) -> int:
            if rng.random() < 0.1:
                return rng.choice([-1, newest[row] + rng.randint(0, query)])
            return rng.randrange(min(span, newest[row]))

        positions = [[[position(row, query) for _ in range(k)] for query in range(queries)] for row in rows]
        valid = [rng.randint(1, queries) for _ in rows]
        left = check_step(residency, references, layer, rows, positions, [newest[row] for row in rows], valid)
        cut += sum(valid) - sum(left)
    assert (cut > 0) == (most_queries > 1)


def adversarial_sequences(size: int, context: int) -> list[tuple[str, list[list[int]]]]:
    """Selections of a row whose newest position is `context` - 1 or beyond."""
    everything = list(range(size))
    beyond = context - size
    return [
        ("a scan never repeats", [[(step * size + i) % (context - 1) for i in range(size)] for step in range(40)]),
        ("all but one is protected", [everything, *([*everything[1:], size + step % 5] for step in range(40))]),
        ("one position alternates", [[step % (size + 1)] + [-1] * (size - 1) for step in range(3 * size)]),
        ("a second lap", [everything, *([size + step % 7, size + 9 + step % 3] * (size // 2) for step in range(60))]),
        (
            "all replaced at once",
            [everything, *([size + (i + step * 8) % beyond for i in range(size)] for step in range(40))],
        ),
        ("nothing selected", [[-1] * size] * 3),
        ("one position repeated", [[size + step % 3] * size for step in range(20)]),
        ("backwards", [[(context - 2 - step * 3 - i) % (context - 1) for i in range(size)] for step in range(40)]),
    ]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("name", "sequence"), adversarial_sequences(6, 30))
def test_adversarial_sequences_follow_the_sequential_policy(name: str, sequence: list[list[int]], queries: int) -> None:
    """With several queries, a step has those of so many steps of the sequence."""
    residency, references = fresh(6, window=queries)
    for first in range(0, len(sequence), queries):
        check_step(residency, references, 0, [0], [sequence[first : first + queries]], [CONTEXT - queries])


def test_slots_that_drafts_were_written_to_hold_nothing_once_a_row_is_long() -> None:
    residency, _ = fresh(8, window=4)
    residency.reset_short(0)
    at = torch.tensor
    short = residency.resolve(0, at([0]), at([[[4, 5, 6, 7]]]), at([4]))
    assert (short.hot.flatten().tolist(), short.misses) == ([4, 5, 6, 7], 0)
    long = residency.resolve(0, at([0]), at([[[3, 4, 5, 8]]]), at([6]))
    assert (long.hot.flatten().tolist(), long.miss_positions.tolist()) == ([3, 4, 0, 10], [5])


def test_queries_that_do_not_exist_select_nothing() -> None:
    residency, references = fresh(4, rows=2, window=2)
    selected = [[0, 1, 2, 3], [9, 9, 9, 9]]
    left = check_step(residency, references, 0, [0, 1], [selected, selected], [30, 30], [1, 2])
    assert left == [1, 1]
    plan = residency.resolve(0, torch.tensor([0]), torch.tensor([selected]), torch.tensor([30]), torch.tensor([0]))
    assert (plan.valid.tolist(), plan.misses, plan.hits) == ([0], 0, 0)


def test_more_positions_than_the_buffer_holds_are_refused() -> None:
    residency, _ = fresh(2)
    with pytest.raises(ValueError, match="3 positions selected, device_buffer_size is 2"):
        residency.resolve(0, torch.tensor([0]), torch.tensor([[[0, 1, 2]]]), torch.tensor([9]))
