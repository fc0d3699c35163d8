"""Layers behind a norm in block-fp8 in Triton's interpreter, whole and divided."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import kernels.triton
from kernels import fp8, ops, torch_ops
from kernels.operands import PartialSums, RmsNorm, RouterConfig, SwiGluWeights
from model.feed_forward import FeedForward, MixtureOfExperts, Router
from model.shard import NO_EXCHANGE, SINGLE_RANK, Exchange, Shard
from model.weights import Linear
from tests.kernels.fp8_cases import close, expected_experts, randn, weight

HIDDEN, WIDTH, EXPERTS, TOP_K = 272, 128, 8, 3
TOKENS = 8
"""Of all processes."""


@pytest.fixture(autouse=True)
def triton_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ops_on", lambda device: kernels.triton)


@dataclass
class Threads:
    """Processes of a group that are threads. One computes at a time, since Triton's interpreter serves one."""

    size: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    gathered: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._brought = [torch.empty(0)] * self.size
        self._barrier = threading.Barrier(self.size, timeout=60)

    def bring(self, rank: int, rows: torch.Tensor) -> list[torch.Tensor]:
        """What all bring, of what one does that has the turn."""
        self._brought[rank] = rows
        self.turn.release()
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        self.turn.acquire()
        return brought


@dataclass
class ThreadsExchange(Exchange):
    """The exchange of one of them."""

    threads: Threads
    rank: int

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = torch.cat(self.threads.bring(self.rank, rows))
        self.threads.gathered.append(gathered)
        return gathered

    def own(self, count: int) -> range:
        return range(self.rank * count, (self.rank + 1) * count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self.threads.bring(self.rank, parts)).float().sum(0)
        return total.to(parts.dtype).chunk(self.threads.size)[self.rank]


class Case:
    """A norm, a mixture of experts, whose last one is shared, and all processes' tokens."""

    def __init__(self) -> None:
        self.norm = RmsNorm((1 + 0.1 * randn(HIDDEN, seed=1)).bfloat16(), 1e-6)
        config = RouterConfig(EXPERTS, TOP_K, 4, 2, True, scale=2.5)
        self.router = Router((0.1 * randn(EXPERTS, HIDDEN, seed=2)).bfloat16(), 0.1 * randn(EXPERTS, seed=3), config)
        self.gate_up = weight(EXPERTS + 1, 2 * WIDTH, HIDDEN, seed=4)
        self.down = weight(EXPERTS + 1, HIDDEN, WIDTH, seed=5)
        self.hidden = (2 * randn(TOKENS, HIDDEN, seed=6)).bfloat16()
        self.addend = randn(TOKENS, HIDDEN, seed=7).bfloat16()

    def mixture(
        self, shard: Shard = SINGLE_RANK, exchange: Exchange = NO_EXCHANGE, apart: bool = False
    ) -> MixtureOfExperts:
        """A process's part. apart: the shared expert is not one of the kernels' experts."""
        own = shard.experts(EXPERTS)
        here = [*own] if apart else [*own, EXPERTS]
        gate_up, down = (
            Linear(torch.stack([values[number] for number in here]), scales[here], power_of_two=True)
            for values, scales in (self.gate_up, self.down)
        )
        shared = FeedForward(*(Linear(values[-1], scales[-1], True) for values, scales in (self.gate_up, self.down)))
        return MixtureOfExperts(self.router, gate_up, down, own.start, len(own), shared if apart else None, exchange)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By plain torch, of all tokens and by all experts."""
        summed = self.hidden + self.addend
        normed = F.rms_norm(summed, (HIDDEN,), self.norm.weight, self.norm.eps)
        logits = PartialSums.of(normed.float() @ self.router.weight.float().t())
        weights, ids = torch_ops.choose_experts(logits, self.router.bias, self.router.config)
        everybody = range(TOKENS)
        return summed, expected_experts(normed, ids, weights, SwiGluWeights(*self.gate_up, *self.down, True), everybody)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_that_route_their_own_tokens_compute_the_mixture_of_all(size: int, apart: bool) -> None:
    case, threads, share = Case(), Threads(size), TOKENS // size

    def computed(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(rank * share, (rank + 1) * share)
        part = case.mixture(Shard(rank, size), ThreadsExchange(threads, rank), apart)
        with threads.turn:
            return part.forward_normed(case.norm, case.hidden[own], case.addend[own])

    with ThreadPoolExecutor(size) as pool:
        summed, outputs = (torch.cat(parts) for parts in zip(*pool.map(computed, range(size)), strict=True))
    expected_sum, expected = case.expected()
    assert torch.equal(summed, expected_sum)
    close(outputs, expected, 0.01)
    close(outputs, case.mixture().forward_normed(case.norm, case.hidden, case.addend)[1], 0.01)
    assert all(rows.dtype == torch.uint8 and len(rows) == TOKENS for rows in threads.gathered)
    assert len(threads.gathered) == size, "one collective brings all that experts need"


def test_padding_takes_nothing_but_the_shared_expert() -> None:
    case, positions = Case(), torch.arange(TOKENS) % 2 - 1
    _, whole = case.mixture().forward_normed(case.norm, case.hidden, case.addend)
    summed, output = case.mixture().forward_normed(case.norm, case.hidden, case.addend, positions)
    inner = fp8.swiglu(fp8.linear(case.norm(summed), *(stack[-1] for stack in case.gate_up), True))
    alone = fp8.linear(inner, *(stack[-1] for stack in case.down), True)
    assert torch.equal(output[positions == 0], whole[positions == 0])
    close(output[positions < 0], alone[positions < 0], 0.01)


def test_a_feed_forward_layer_takes_what_the_norm_has_quantised() -> None:
    case = Case()
    gate_up, down = weight(512, HIDDEN), weight(HIDDEN, 256)
    layer = FeedForward(Linear(*gate_up, True), Linear(*down, True))
    summed, output = layer.forward_normed(case.norm, case.hidden, case.addend)
    assert torch.equal(summed, case.hidden + case.addend)
    inner = fp8.swiglu(fp8.linear(case.norm(summed), *gate_up, True))
    close(output, fp8.linear(inner, *down, True), 0.01)
