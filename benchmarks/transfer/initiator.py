"""Measures every method in every case, by turns, after comparing the bytes that it leaves."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

from benchmarks.transfer import lineup, wire
from benchmarks.transfer.cases import Case, Group, Protocol
from benchmarks.transfer.methods import CaseResult, Method, MethodFailed, MethodResult, Run
from benchmarks.transfer.placement import place
from benchmarks.transfer.pools import digests
from benchmarks.transfer.workbench import Workbench


class Watcher(Interface):
    """Is told how far a measurement is."""

    def case(self, case: Case) -> None: ...

    def round_done(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """rounds: timed runs of each method in each case. groups: which methods.

    A method that takes longer than `slow_seconds` is run once: the run whose bytes are compared is its figure.
    """

    cases: Sequence[Case]
    rounds: int
    slow_seconds: float
    groups: frozenset[Group]

    @property
    def num_rounds(self) -> int:
        """How often a watcher hears of a round, those for comparison included."""
        return len(self.cases) * (self.rounds + 1) * (2 if Group.NIXL in self.groups else 1)


class Initiator:
    """Runs a plan on a workbench. Methods take turns, so that what else the machine does meets all of them."""

    def __init__(self, bench: Workbench, plan: Plan, watcher: Watcher) -> None:
        self._bench = bench
        self._plan = plan
        self._watcher = watcher
        self._sizes: set[tuple[object, ...]] = set()
        self._order = random.Random(0)

    def run(self) -> list[CaseResult]:
        """Raises MethodFailed if a method cannot send or leaves wrong bytes, StartupError if the target cannot."""
        try:
            return [self._measure(case) for case in self._plan.cases]
        finally:
            self._bench.close()

    def _measure(self, case: Case) -> CaseResult:
        self._watcher.case(case)
        placement = place(case)
        with lineup.methods(self._bench, case, placement, self._groups(case)) as methods:
            results = self._by_turns(case, methods)
        if Group.NIXL in self._plan.groups:
            # Its progress threads take a core each, so it has its turns when the others have had theirs.
            with lineup.nixl(self._bench, case, placement) as methods:
                results += self._by_turns(case, methods)
        return CaseResult(case, tuple(results))

    def _groups(self, case: Case) -> frozenset[Group]:
        """What is to be measured. One descriptor per token with an engine only once for each size.

        It takes seconds, and how scattered the tokens are makes no difference to it.
        """
        size = (case.protocol, case.tokens, case.layers, case.item_bytes, case.concurrency)
        again = case.protocol is not Protocol.SHM and size in self._sizes
        self._sizes.add(size)
        return self._plan.groups - {Group.TOKEN} if again else self._plan.groups

    def _by_turns(self, case: Case, methods: Sequence[Method]) -> list[MethodResult]:
        first = [self._compared(case, method) for method in methods]
        self._watcher.round_done()
        runs: list[list[Run]] = [[] for _ in methods]
        for _ in range(self._plan.rounds):
            turns = [i for i, run in enumerate(first) if run.seconds <= self._plan.slow_seconds]
            for i in self._order.sample(turns, len(turns)):
                runs[i].append(methods[i].run())
            self._watcher.round_done()
        return [
            MethodResult(method.name, method.group, tuple(timed) or (only,))
            for method, timed, only in zip(methods, runs, first, strict=True)
        ]

    def _compared(self, case: Case, method: Method) -> Run:
        """Run once on a wiped pool and compare every byte there with the source's."""
        link = self._bench.link
        link.ask(wire.Wipe(), wire.Done)
        run = method.run()
        found = link.ask(wire.Digest(slots=method.placement.slots.astype("<i8").tobytes()), wire.Digests).layers
        expected = digests(self._bench.pools(case).kv, method.placement.items)
        if wrong := [layer for layer, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]:
            raise MethodFailed(f"{method.name} left wrong bytes in layers {wrong} of {case}")
        return run
