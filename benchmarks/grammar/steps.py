"""Decode steps in which every request is constrained, beside steps in which none is."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from benchmarks.decode.workload import Requests
from benchmarks.stepping import launch
from control.messages import Sampling
from engine.grammar.masks import MaskWriter
from engine.grammar.state import CompiledGrammar
from engine.runner import LaunchedStep, ModelRunner
from model.backends.choice import choose_backend
from model.config import network_config
from model.network import Network
from model.sparse_model import SparseModel
from model.tiny import tiny_config
from model.weights import RandomWeights

_CONTEXT = 64
_TURNS = 10
"""Steps of one kind, before some of the other: what else the machine does meets both."""


@dataclass(frozen=True)
class GrammarStepTimes:
    """Median milliseconds of a step: how long it took, and how long processors worked."""

    ms: float
    processor_ms: float


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

    def compare(
        self, grammar: CompiledGrammar, tokens: Sequence[int], steps: int
    ) -> tuple[GrammarStepTimes, GrammarStepTimes]:
        """So many steps without a grammar, and with one: each request is at another place of an answer, of `tokens`."""
        states = [grammar.start() for _ in self._requests.ids]
        at = [index * len(tokens) // len(states) for index in range(len(states))]
        for state, start in zip(states, at, strict=True):
            for token_id in tokens[:start]:
                state.advance(token_id)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(2 * steps + _TURNS):
            constrained = number // _TURNS % 2 == 1
            began, work_began = time.perf_counter(), time.process_time()
            self._requests.make_room()
            launched = launch(self._runner, self._requests.coordinator, self._requests.ids, self._sampling, 0.5)
            if self._before is not None:
                self._runner.collect(self._before)
            masks = None
            if constrained:
                for index, state in enumerate(states):
                    if at[index] < len(tokens):
                        state.advance(tokens[at[index]])
                        at[index] += 1
                masks = self._writer.write(states).words
            self._runner.sample(launched, masks=masks)
            self._before = launched
            if number >= _TURNS:
                spent = time.perf_counter() - began, time.process_time() - work_began
                times[constrained].append((1e3 * spent[0], 1e3 * spent[1]))
        free, bound = (
            GrammarStepTimes(*map(statistics.median, zip(*times[kind], strict=True))) for kind in (False, True)
        )
        return free, bound

    def close(self) -> None:
        """Finish the requests."""
        if self._before is not None:
            self._runner.collect(self._before)
        self._requests.close()
