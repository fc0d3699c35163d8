"""Decode steps in which every request is constrained, beside steps in which none is."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.decode.workload import Requests
from benchmarks.stepping import launch, sample
from control.messages import Sampling
from engine.grammar.masks import MaskWriter
from engine.grammar.state import CompiledGrammar
from engine.runner import LaunchedStep, ModelRunner
from model.config import network_config
from model.loader import choose_backend
from model.network import Network
from model.sparse_model import SparseModel
from model.tiny import tiny_config
from model.weights import RandomWeights

_CONTEXT = 64
_BLOCK = 2
"""Steps of one kind in a row: a pair is so short that the machine's speed of the moment meets both kinds."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step, in the mean of some in a row: how long it took, and how long processors worked."""

    ms: float
    processor_ms: float


@dataclass(frozen=True)
class PairedTimes:
    """Of steps without a grammar and of steps with one, taken in turns: a pair each."""

    free: Sequence[StepTimes]
    bound: Sequence[StepTimes]

    def cells(self, of: Callable[[StepTimes], float]) -> list[str]:
        """For a table: medians of both, and the median and the quartiles of how much longer a pair's second is."""
        ratios = [of(bound) / of(free) - 1 for free, bound in zip(self.free, self.bound, strict=True)]
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        medians = (statistics.median(map(of, kind)) for kind in (self.free, self.bound))
        return [*(f"{median:.2f}" for median in medians), f"{middle:+.1%}", f"{low:+.1%} to {high:+.1%}"]


class GrammarSteps:
    """A batch of requests of a tiny model with a vocabulary of a given size, in the order of calls of a decode node."""

    def __init__(
        self, batch: int, vocab_size: int, layers: int, hidden_size: int, device: torch.device, threads: int | None
    ) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        described = tiny_config("deepseek_v32", vocab_size=vocab_size, layers=layers, hidden_size=hidden_size)
        sizes = network_config(AutoConfig.for_model(**described))
        spec = sizes.spec(dtype, _CONTEXT + 512, "random")
        network = Network.load(RandomWeights(device, dtype), sizes)
        self._requests = Requests(spec, _CONTEXT, batch, spec.context_length, device)
        self._runner = ModelRunner(
            SparseModel(network, spec, choose_backend("auto", device, spec)),
            self._requests.coordinator,
            batch,
            spec.context_length,
            record=device.type == "cuda",
        )
        self._writer = MaskWriter(batch, -(-vocab_size // 32), device.type == "cuda", threads)
        self._sampling = Sampling(temperature=1.0, seed=1)
        for request_id in self._requests.ids:
            self._runner.admit(request_id, [1], [], self._sampling)
        self._before: LaunchedStep | None = None

    def compare(self, grammar: CompiledGrammar, tokens: Sequence[int], steps: int) -> PairedTimes:
        """So many steps without a grammar, and with one, in pairs of `_BLOCK` steps each: each request is at another
        place of an answer, of `tokens`, and begins it again when it is at its end."""
        answers = [
            _Answer(grammar, tokens, index * len(tokens) // len(self._requests.ids))
            for index in range(len(self._requests.ids))
        ]
        # Warm up: the first steps are slower.
        for kind in (None, answers):
            self._block(kind)
        pairs = []
        for number in range(-(-steps // _BLOCK)):
            # In turns which kind is first: what a step leaves in caches and to the allocator meets both.
            if number % 2:
                bound, free = self._block(answers), self._block(None)
            else:
                free, bound = self._block(None), self._block(answers)
            pairs.append((free, bound))
        free_times, bound_times = zip(*pairs, strict=True)
        return PairedTimes(free_times, bound_times)

    def _block(self, answers: Sequence["_Answer"] | None) -> StepTimes:
        """Some steps in a row. answers: those of the requests; None: no request is constrained."""
        passed = worked = 0.0
        for _ in range(_BLOCK):
            for answer in answers or ():
                answer.begin_again_at_end()
            began, work_began = time.perf_counter(), time.process_time()
            self._step(answers)
            passed += time.perf_counter() - began
            worked += time.process_time() - work_began
        return StepTimes(1e3 * passed / _BLOCK, 1e3 * worked / _BLOCK)

    def _step(self, answers: Sequence["_Answer"] | None) -> None:
        self._requests.make_room()
        launched = launch(self._runner, self._requests.coordinator, self._requests.ids, self._sampling)
        if self._before is not None:
            self._runner.collect(self._before)
        masks = None
        if answers is not None:
            for answer in answers:
                answer.advance()
            masks = self._writer.write([answer.state for answer in answers]).words
        sample(self._runner, launched, masks=masks)
        self._before = launched

    def close(self) -> None:
        """Finish the requests."""
        if self._before is not None:
            self._runner.collect(self._before)
        self._requests.close()


class _Answer:
    """A request's place in an answer and in its grammar."""

    def __init__(self, grammar: CompiledGrammar, tokens: Sequence[int], start: int) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._at = start
        self.state = grammar.start(generated=tokens[:start])

    def advance(self) -> None:
        self.state.advance(self._tokens[self._at])
        self._at += 1

    def begin_again_at_end(self) -> None:
        if self._at == len(self._tokens):
            self.state, self._at = self._grammar.start(), 0
