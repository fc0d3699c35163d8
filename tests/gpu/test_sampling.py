"""Sampling on a CUDA device: thresholds that only the whole vocabulary decides, and nothing that waits."""

import pytest
import torch

from control.messages import Sampling, Token
from engine.adjustments import LogitAdjustments
from engine.sampling import NoToken, RandomStream, SamplingNeeds, draw, settings_of, tokens_of
from kernels import torch_ops
from kernels.ops import ops_on
from kernels.torch_ops import CANDIDATES
from tests.gpu.test_decode import waiting_is_an_error

pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)
VOCAB = 129_280
REQUESTS = [
    Sampling(seed=1),
    Sampling(temperature=0),
    Sampling(seed=2, top_k=40, top_p=0.9),
    Sampling(seed=3, top_p=0.99),
    Sampling(seed=4, top_k=CANDIDATES + 1),
    Sampling(seed=5, top_k=50_000, top_p=0.7),
    Sampling(seed=6, top_k=VOCAB - 1, top_p=0.999),
    Sampling(seed=7, top_p=1e-6),
]


def random_logits(scale: float, bfloat16: bool = False) -> torch.Tensor:
    logits = scale * torch.randn(len(REQUESTS), VOCAB, generator=torch.Generator().manual_seed(0))
    return logits.bfloat16().float() if bfloat16 else logits


def keys_of(requests: list[Sampling], index: int) -> torch.Tensor:
    return torch.tensor([int(RandomStream(request.seed).keys(index, 1)[0]) for request in requests])


def settings() -> torch.Tensor:
    return torch.tensor([settings_of(request, VOCAB) for request in REQUESTS], dtype=torch.float64).T


@pytest.mark.parametrize("scale", [3.0, 0.3, 0.01, 0.0])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_thresholds_are_those_of_a_sorted_vocabulary(
    scale: float, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat logits, with the many equal ones that bfloat16 has, need all of it."""
    logits = random_logits(scale, bfloat16)
    scaled = logits - logits.amax(-1, keepdim=True)
    _, top_p, top_k, _ = settings().unsqueeze(2)
    monkeypatch.setattr(torch_ops, "CANDIDATES", VOCAB)
    exact = torch_ops.find_threshold(scaled, top_k, top_p)
    found = ops_on(CUDA).find_threshold(scaled.to(CUDA), top_k.to(CUDA), top_p.to(CUDA))
    for row, request in enumerate(REQUESTS):
        kept = [(scaled[row] > t.least[row].cpu()).sum() + t.equals[row].cpu() for t in (exact, found)]
        if request.top_k == 0 and request.top_p == 1:
            assert found.least[row] == float("-inf")
        else:
            # Sums of as many numbers differ in their last bits, and so may what a top_p takes in at its border.
            assert abs(int(kept[0]) - int(kept[1])) <= (0 if request.top_p == 1 else 1)


def test_noise_is_that_of_the_host() -> None:
    logits, temperature = random_logits(3.0), torch.tensor([request.temperature for request in REQUESTS])
    keys = keys_of(REQUESTS, 5)
    there = ops_on(CUDA).perturb(logits.to(CUDA), temperature.to(CUDA), keys.to(CUDA))
    torch.testing.assert_close(there.cpu(), torch_ops.perturb(logits, temperature, keys), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("scale", [3.0, 0.01])
def test_tokens_are_those_of_the_host(scale: float) -> None:
    logits, needs = random_logits(scale), SamplingNeeds.of(REQUESTS)
    same = 0
    for index in range(8):
        keys = keys_of(REQUESTS, index)
        there = draw(logits.to(CUDA), settings().to(CUDA), keys.to(CUDA), needs, logits.to(CUDA))
        here = draw(logits, settings(), keys, needs, logits)
        same += sum(a == b for a, b in zip(tokens_of(there.cpu(), REQUESTS), tokens_of(here, REQUESTS), strict=True))
    assert same >= 8 * len(REQUESTS) - 1, "but for scores that are nearly equal"


def test_drawing_waits_for_nothing_whatever_it_takes() -> None:
    logits, needs = random_logits(0.01).to(CUDA), SamplingNeeds.of(REQUESTS)
    on_device, keys = settings().to(CUDA), keys_of(REQUESTS, 0).to(CUDA)
    draw(logits, on_device, keys, needs, logits)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        drawn = draw(logits, on_device, keys, needs, logits)
    assert all(isinstance(token, Token) for token in tokens_of(drawn.cpu(), REQUESTS))


@pytest.mark.parametrize("scale", [3.0, 0.01], ids=["candidates decide", "the whole vocabulary decides"])
@pytest.mark.parametrize("nonsense", [float("nan"), float("inf")])
def test_changed_logits_that_are_not_finite_cost_their_own_row_alone(nonsense: float, scale: float) -> None:
    logits, needs = random_logits(scale).to(CUDA), SamplingNeeds.of(REQUESTS)
    keys = keys_of(REQUESTS, 0).to(CUDA)
    on_device = settings().to(CUDA)
    alone = tokens_of(draw(logits, on_device, keys, needs, logits).cpu(), REQUESTS)
    for row in range(len(REQUESTS)):
        for places in (slice(7, 8), slice(None)):
            changed = logits.clone()
            changed[row, places] = nonsense
            found = tokens_of(draw(logits, on_device, keys, needs, changed).cpu(), REQUESTS)
            assert found[row] is NoToken.NOT_FINITE
            assert found[:row] + found[row + 1 :] == alone[:row] + alone[row + 1 :]


def test_changes_that_overflow_harm_no_device_and_no_others() -> None:
    """Bounds keep such a penalty out. Here a request has one nevertheless."""
    hostile = Sampling.model_construct(seed=1, repetition_penalty=1e-45)
    honest = [Sampling(seed=2, repetition_penalty=1.2), Sampling(temperature=0, frequency_penalty=0.5)]
    logits, prompt = random_logits(3.0)[:3].to(CUDA), range(0, VOCAB, 2)
    embeddings = torch.arange(VOCAB, device=CUDA)

    def steps(requests: list[Sampling]) -> list[list[Token | NoToken]]:
        adjustments = LogitAdjustments(len(requests), VOCAB, CUDA)
        for row, request in enumerate(requests):
            adjustments.admit(row, request, prompt, [])
        rows, needs = torch.arange(len(requests), device=CUDA), SamplingNeeds.of(requests)
        on_device = torch.tensor([settings_of(r, VOCAB) for r in requests], dtype=torch.float64).T.to(CUDA)
        found = []
        for index in range(4):
            keys = keys_of(requests, index)
            changed = adjustments.apply(logits[: len(rows)], rows, [])
            drawn = draw(logits[: len(rows)], on_device, keys.to(CUDA), needs, changed)
            token_ids = drawn[:, 0].long()
            adjustments.count(rows, token_ids)
            assert torch.equal(embeddings[token_ids.clamp(min=0)], token_ids.clamp(min=0))
            found.append(tokens_of(drawn.cpu(), requests))
        torch.cuda.synchronize()
        return found

    together = steps([*honest, hostile])
    assert [step[2] for step in together] == [NoToken.NOT_FINITE] * 4
    assert [step[:2] for step in together] == steps(honest)
