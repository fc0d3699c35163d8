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
    position_at: list[int] = field(default_factory=list)
    referenced: list[bool] = field(default_factory=list)
    hand: int = 0

    def __post_init__(self) -> None:
        self.position_at = [-1] * self.size
        self.referenced = [False] * self.size

    def resolve(self, positions: list[int], newest: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Hot index of every selected position, and the misses with their victims in order."""
        if newest < self.size:
            return list(positions), []
        resident = {p: hot for hot, p in enumerate(self.position_at) if p >= 0}
        protected = set()
        misses: list[int] = []
        for position in positions:
            if position in resident:
                protected.add(resident[position])
                self.referenced[resident[position]] = True
            elif position not in (-1, newest) and position not in misses:
                misses.append(position)
        victims = self._victims(len(misses), protected)
        for position, victim in zip(misses, victims, strict=True):
            self.position_at[victim] = position
        resident = {p: hot for hot, p in enumerate(self.position_at) if p >= 0}
        hot = [-1 if p == -1 else self.size if p == newest else resident[p] for p in positions]
        return hot, list(zip(misses, victims, strict=True))

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
    positions: list[list[int]],
    newest: list[int],
) -> None:
    resident_before = {row: set(references[layer, row].position_at) for row in rows}
    plan = residency.resolve(layer, torch.tensor(rows), torch.tensor(positions), torch.tensor(newest))
    misses = list(zip(plan.miss_batch.tolist(), plan.miss_positions.tolist(), plan.miss_hot.tolist(), strict=True))
    expected_misses = []
    for b, row in enumerate(rows):
        reference = references[layer, row]
        hot, row_misses = reference.resolve(positions[b], newest[b])
        assert plan.hot[b].tolist() == hot
        expected_misses += [(b, position, victim) for position, victim in row_misses]
        assert state_of(residency, layer, row) == (reference.position_at, reference.referenced, reference.hand)
        hits = resident_before[row] & set(positions[b]) - {-1}
        assert hits <= set(reference.position_at) or newest[b] < reference.size, "a hit was evicted"
        inverse = {p: h for h, p in enumerate(reference.position_at) if p >= 0}
        found = residency.lookup(layer, torch.tensor([row]), torch.arange(CONTEXT)[None])
        assert found[0].tolist() == [inverse.get(p, -1) for p in range(CONTEXT)]
    assert misses == expected_misses
    assert plan.misses == len(expected_misses)
    assert plan.hits == sum(p >= 0 for row in positions for p in row) - len(expected_misses)


def fresh(size: int, layers: int = 1, rows: int = 1) -> tuple[Residency, dict[tuple[int, int], SequentialClock]]:
    residency = Residency(layers, rows, CONTEXT, size, torch.device("cpu"))
    return residency, {(layer, row): SequentialClock(size) for layer in range(layers) for row in range(rows)}


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], int]]]:
    size = draw(st.integers(1, 9))
    k = draw(st.integers(1, size))
    newest = draw(st.integers(0, 20))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        positions = draw(st.lists(st.integers(-1, newest), min_size=k, max_size=k))
        steps.append((positions, newest))
        newest += 1
    return size, steps


@settings(max_examples=150)
@given(walks())
def test_one_row_follows_the_sequential_policy(walk: tuple[int, list[tuple[list[int], int]]]) -> None:
    size, steps = walk
    residency, references = fresh(size)
    if steps[0][1] <= size:
        residency.reset_short(0)
        references[0, 0].position_at = list(range(size))
    for positions, newest in steps:
        check_step(residency, references, 0, [0], [positions], [newest])


@pytest.mark.parametrize("seed", range(4))
def test_batches_follow_the_sequential_policy_over_thousands_of_steps(seed: int) -> None:
    rng = random.Random(seed)
    size, k, layers, num_rows = 8, rng.choice([3, 5, 8]), 2, 5
    residency, references = fresh(size, layers, num_rows)
    newest = {row: rng.randrange(size + 1, CONTEXT) for row in range(num_rows)}
    for _ in range(1500):
        layer = rng.randrange(layers)
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        span = rng.choice([size, size + 1, CONTEXT])
        positions = [
            [
                rng.choice([-1, newest[row]]) if rng.random() < 0.1 else rng.randrange(min(span, newest[row]))
                for _ in range(k)
            ]
            for row in rows
        ]
        check_step(residency, references, layer, rows, positions, [newest[row] for row in rows])


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


@pytest.mark.parametrize(("name", "sequence"), adversarial_sequences(6, 30))
def test_adversarial_sequences_follow_the_sequential_policy(name: str, sequence: list[list[int]]) -> None:
    residency, references = fresh(6)
    for positions in sequence:
        check_step(residency, references, 0, [0], [positions], [CONTEXT - 1])


def test_more_positions_than_the_buffer_holds_are_refused() -> None:
    residency, _ = fresh(2)
    with pytest.raises(ValueError, match="3 positions selected, device_buffer_size is 2"):
        residency.resolve(0, torch.tensor([0]), torch.tensor([[0, 1, 2]]), torch.tensor([9]))
