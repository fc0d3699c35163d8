import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control.messages import Sampling, Token
from engine.grammar.masks import few_allowed
from engine.sampling import NoToken, RandomStream, SamplingNeeds, _choose, draw, settings_of, tokens_of
from kernels import torch_ops
from kernels.torch_ops import CANDIDATES

VOCAB = 50


def random_logits(batch: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))


def keys_of(requests: Sequence[Sampling], steps: Sequence[int]) -> torch.Tensor:
    keys = [RandomStream(sampling.seed).keys(step, 1) for sampling, step in zip(requests, steps, strict=True)]
    return torch.from_numpy(np.concatenate(keys))


def sample(
    logits: torch.Tensor, requests: Sequence[Sampling], steps: Sequence[int], changed: torch.Tensor | None = None
) -> list[Token | NoToken]:
    """One token per row of logits, or of changed ones; steps[b]: the index of request b's token in its answer."""
    settings = torch.tensor([settings_of(sampling, logits.shape[1]) for sampling in requests], dtype=torch.float64).T
    changed = logits if changed is None else changed
    drawn = draw(logits, settings, keys_of(requests, steps), SamplingNeeds.of(requests), changed)
    return tokens_of(drawn, requests)


def drawn_tokens(logits: torch.Tensor, params: Sampling, count: int) -> list[int]:
    """The first tokens of a request whose logits never change."""
    return tokens(sample(logits.expand(count, -1), [params] * count, range(count)))


def tokens(results: list[Token | NoToken]) -> list[int]:
    """The tokens of a batch in which every request has one."""
    found = [result.token_id for result in results if isinstance(result, Token)]
    assert len(found) == len(results)
    return found


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = random_logits(8)
    sampled = sample(logits, [Sampling(temperature=0.0)] * 8, [0] * 8)
    assert sampled == [Token(token_id=token_id) for token_id in logits.argmax(-1).tolist()]


params_strategy = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    seed=st.integers(0, 2**63 - 1),
    top_logprobs=st.none() | st.integers(0, 5),
)


@settings(max_examples=60)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=6), step=st.integers(0, 2**31), data_seed=st.integers(0, 99)
)
def test_a_token_depends_on_nothing_but_its_own_request(params: list[Sampling], step: int, data_seed: int) -> None:
    # More tokens than candidates; some rows so flat that the candidates do not decide.
    logits = random_logits(len(params), data_seed, vocab=CANDIDATES + 500)
    logits[::2] *= 0.1
    steps = [step + row for row in range(len(params))]
    together = sample(logits, params, steps)
    alone = [sample(logits[row : row + 1], params[row : row + 1], [steps[row]])[0] for row in range(len(params))]
    assert tokens(together) == tokens(alone)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (Sampling(seed=0), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(seed=0, temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Sampling(seed=0, top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(seed=0, top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(seed=0, top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        # top_p counts the probabilities that top_k leaves: 4/7 alone reach one half.
        (Sampling(seed=0, top_k=2, top_p=0.5), [0, 0, 0, 1]),
        # min_p is relative to the likeliest token, at the temperature that is asked for.
        (Sampling(seed=0, min_p=0.7), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(seed=0, min_p=0.3, temperature=0.5), [0, 0, 9 / 25, 16 / 25]),
        # top_p counts the probabilities that min_p leaves: 4/7 alone reach one half.
        (Sampling(seed=0, min_p=0.7, top_p=0.5), [0, 0, 0, 1]),
    ],
)
def test_frequencies_follow_the_distribution(params: Sampling, expected: list[float]) -> None:
    draws = 20_000
    drawn = drawn_tokens(torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), params, draws)
    for token, probability in enumerate(expected):
        deviation = 4 * math.sqrt(draws * probability * (1 - probability))
        assert abs(drawn.count(token) - draws * probability) <= deviation


def exact_noise(key: int, vocab: int) -> torch.Tensor:
    """Gumbel noise of the first tokens: SplitMix64 in Python's integers."""
    noise = []
    for token in range(vocab):
        z = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        noise.append(-math.log(-math.log(((z >> 12) + 0.5) / 2**52)))
    return torch.tensor(noise, dtype=torch.float64)


def exact_tokens(logits: torch.Tensor, params: Sampling, step: int) -> set[int]:
    """What the Gumbel-max trick in float64 picks, and what comes within rounding of it."""
    scaled = logits.double() / params.temperature
    ordered, order = scaled.sort(descending=True, stable=True)
    probabilities = ordered[: params.top_k if params.top_k > 0 else None].softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    stay = max(1, int((likelier < params.top_p).sum()))
    kept = torch.full_like(scaled, -math.inf)
    kept[order[:stay]] = scaled[order[:stay]]
    kept += exact_noise(int(np.random.Philox(key=params.seed, counter=step).random_raw()), len(logits))
    return set((kept >= kept.max() - 1e-5).nonzero().flatten().tolist())


@pytest.mark.parametrize("scale", [3.0, 0.01], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    "params",
    [
        Sampling(seed=5),
        Sampling(seed=5, temperature=0.5, top_p=0.9),
        Sampling(seed=5, top_k=40),
        Sampling(seed=5, top_k=40, top_p=0.3),
        Sampling(seed=5, top_k=CANDIDATES),
        Sampling(seed=5, top_k=CANDIDATES + 1),
        Sampling(seed=5, top_k=CANDIDATES + 300, top_p=0.99),
    ],
    ids=str,
)
def test_tokens_are_those_of_exact_arithmetic(params: Sampling, scale: float) -> None:
    """In vocabularies larger than the candidates, with the many equal logits that bfloat16 has."""
    logits = (scale * random_logits(1, vocab=3 * CANDIDATES)).bfloat16().float()
    for step, token in enumerate(drawn_tokens(logits, params, 30)):
        assert token in exact_tokens(logits[0], params, step)


def test_of_equally_likely_tokens_the_first_stay() -> None:
    logits = torch.tensor([[0.0, 1.0, -9.0, 1.0, 0.0, 0.0]])
    assert set(drawn_tokens(logits, Sampling(seed=1, top_k=3), 60)) == {0, 1, 3}
    assert set(drawn_tokens(torch.zeros(1, 8), Sampling(seed=1, top_p=0.5), 60)) == {0, 1, 2, 3}


@settings(max_examples=120)
@given(
    nonsense=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38]), min_size=1, max_size=VOCAB),
    kind=st.sampled_from(
        [{}, {"temperature": 0.0}, {"temperature": 1e-300}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    ),
    row=st.integers(0, 2),
    is_changed=st.booleans(),
)
@example(nonsense=[-math.inf] * VOCAB, kind={"temperature": 0.0}, row=1, is_changed=True)
@example(nonsense=[-math.inf] * VOCAB, kind={"top_k": 3, "min_p": 0.1}, row=1, is_changed=True)
def test_logits_that_are_not_finite_cost_their_own_row_alone(
    nonsense: list[float], kind: dict[str, Any], row: int, is_changed: bool
) -> None:
    """The logits of the model, or those that a request has changed, which may be minus infinity."""
    params = [Sampling(seed=1, top_k=5), Sampling(temperature=0.0), Sampling(seed=2, top_logprobs=2)]
    params[row] = Sampling(seed=3, top_logprobs=2, **kind)
    logits = random_logits(3)
    expected = sample(logits, params, [0] * 3)
    changed = logits.clone()
    changed[row, : len(nonsense)] = torch.tensor(nonsense)
    results = sample(logits if is_changed else changed, params, [0] * 3, changed)
    found = results.pop(row)
    if math.nan in nonsense or math.inf in nonsense or (-math.inf in nonsense and not is_changed):
        assert found is NoToken.NOT_FINITE
    elif len(nonsense) == VOCAB and set(nonsense) == {-math.inf}:
        assert found is NoToken.NOTHING_ALLOWED
    else:
        assert isinstance(found, Token)
        assert 0 <= found.token_id < VOCAB
    del expected[row]
    assert results == expected


@pytest.mark.parametrize("nonsense", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [Sampling(), Sampling(temperature=0.0), Sampling(top_k=3, top_p=0.5), Sampling(min_p=0.1)],
    ids=["all", "greedy", "restricted", "floored"],
)
def test_what_is_drawn_among_nonsense_is_in_the_vocabulary(nonsense: float, params: Sampling) -> None:
    changed = torch.full((1, VOCAB), nonsense)
    settings = torch.tensor([settings_of(params, VOCAB)], dtype=torch.float64).T
    token = _choose(changed, settings, torch.tensor([5]), SamplingNeeds.of([params]))
    assert 0 <= int(token) < VOCAB


@pytest.mark.parametrize("vocab", [70, 70_001])
@pytest.mark.parametrize("fields", [{}, {"top_k": 9}, {"top_p": 0.7, "top_logprobs": 2}, {"min_p": 0.01}])
def test_a_mask_gives_the_token_that_minus_infinity_gives(vocab: int, fields: dict[str, Any]) -> None:
    counts = [0, 1, 5, vocab // 3, 5 * vocab // 8 + 1, vocab - 1, vocab, 1, vocab]
    logits = random_logits(len(counts), vocab=vocab)
    logits[-2:, 1] = float("nan")
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    for row, count in enumerate(counts):
        allowed[row, torch.randperm(vocab, generator=torch.Generator().manual_seed(row))[:count]] = True
    bits = np.zeros((len(counts), -(-vocab // 32) * 32), dtype=np.uint8)
    bits[:, :vocab] = allowed.numpy()
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    assert sorted(few_allowed(masks, vocab)) == [row for row, count in enumerate(counts) if 8 * count <= 5 * vocab]
    requests = [Sampling(temperature=row % 3, **fields) for row in range(len(counts))]
    settings = torch.tensor([settings_of(sampling, vocab) for sampling in requests], dtype=torch.float64).T
    keys = keys_of(requests, range(len(counts)))
    arguments = settings, keys, SamplingNeeds.of(requests)
    expected = tokens_of(draw(logits, *arguments, logits.masked_fill(~allowed, float("-inf"))), requests)
    assert tokens_of(draw(logits, *arguments, logits, masks), requests) == expected
    alone = settings[:, 2:3], keys[2:3], SamplingNeeds.of(requests[2:3])
    assert tokens_of(draw(logits[2:3], *alone, logits[2:3], masks[2:3]), requests[2:3]) == expected[2:3]
    assert [found for found in expected if isinstance(found, NoToken)] == [
        NoToken.NOTHING_ALLOWED, NoToken.NOT_FINITE, NoToken.NOT_FINITE
    ]  # fmt: skip


def test_what_few_candidates_do_not_decide_is_decided_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(40)
    requests = [Sampling(seed=seed, top_k=seed % 30, top_p=0.5 + 0.01 * seed) for seed in range(40)]
    expected = sample(logits, requests, range(40))
    monkeypatch.setattr(torch_ops, "CANDIDATES", 4)
    assert sample(logits, requests, range(40)) == expected


def test_a_stream_of_numbers_may_be_entered_anywhere() -> None:
    def number(index: int) -> int:
        return int(np.random.Philox(key=7, counter=index).random_raw(1).view(np.int64)[0])

    stream = RandomStream(7)
    assert [int(key) for index in range(200) for key in stream.keys(index, 1)] == [number(i) for i in range(200)]
    for index in (5, 199, 0, 2**31):
        assert stream.keys(index, 70).tolist() == [number(index + i) for i in range(70)]


def test_nearly_the_same_distribution_mostly_gives_the_same_token() -> None:
    """Drafts are right because of it: a total variation of v would allow 1 - v at best."""
    logits, count = random_logits(1, vocab=500), 2000
    near = logits + 0.1 * random_logits(1, seed=1, vocab=500)
    variation = float((logits.softmax(-1) - near.softmax(-1)).abs().sum()) / 2
    params = Sampling(seed=3)
    pairs = zip(drawn_tokens(logits, params, count), drawn_tokens(near, params, count), strict=True)
    same = sum(ours == theirs for ours, theirs in pairs) / count
    assert 1 - 2.2 * variation < same <= 1 - variation + 0.03


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = 100 * random_logits(1)
    assert set(drawn_tokens(logits, Sampling(temperature=temperature, seed=1), 20)) == {int(logits.argmax())}


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    logits = random_logits(4)
    params = [
        Sampling(temperature=0.0, top_logprobs=3),
        Sampling(temperature=2.0, top_k=2, seed=1, top_logprobs=5),
        Sampling(seed=1),
        Sampling(seed=1, top_logprobs=0),
    ]
    sampled = sample(logits, params, [0] * 4)
    expected = logits.log_softmax(-1)
    assert sampled[2] == Token(token_id=tokens(sampled)[2])
    for row, count in ((0, 3), (1, 5), (3, 0)):
        result = sampled[row]
        assert result is not None
        assert result.logprob == pytest.approx(float(expected[row, result.token_id]))
        best = expected[row].topk(count)
        assert [token for token, _ in result.top_logprobs] == best.indices.tolist()
        assert [value for _, value in result.top_logprobs] == pytest.approx(best.values.tolist())
