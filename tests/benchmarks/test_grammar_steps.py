"""Steps with and without grammars are compared pair by pair."""

import torch

from benchmarks.grammar.steps import GrammarSteps, PairedTimes, StepTimes
from benchmarks.kernel_times import exclusive_times
from control.grammar import TextChoice
from tests.engine.grammar.small import PADDED, compiled, encode


def test_the_median_of_pairs_knows_nothing_of_the_speed_of_the_moment() -> None:
    free = [StepTimes(ms, ms) for ms in (10.0, 10.0, 60.0, 10.0, 70.0)]
    bound = [StepTimes(1.05 * step.ms, 2 * step.processor_ms) for step in free]
    pairs = PairedTimes(free, bound)
    assert pairs.cells(lambda step: step.ms) == ["10.00", "10.50", "+5.0%", "+5.0% to +5.0%"]
    assert pairs.cells(lambda step: step.processor_ms)[2] == "+100.0%"


def test_a_kernel_that_waits_for_the_one_before_counts_from_its_end() -> None:
    ran = [(10.0, 14.0, "second"), (0.0, 12.0, "first"), (11.0, 11.5, "hidden"), (20.0, 21.0, "later")]
    assert exclusive_times(ran) == [("first", 0.012), ("second", 0.002), ("hidden", 0.0), ("later", 0.001)]


def test_answers_that_end_begin_again() -> None:
    grammar = compiled(TextChoice(options=("yes", "no")))
    steps = GrammarSteps(3, PADDED, layers=1, hidden_size=16, device=torch.device("cpu"), threads=1)
    pairs = steps.compare(grammar, encode("yes"), steps=5)
    steps.close()
    assert len(pairs.free) == len(pairs.bound) == 3
    assert all(step.ms > 0 for step in (*pairs.free, *pairs.bound))
