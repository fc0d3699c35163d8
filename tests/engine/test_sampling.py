import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import CANDIDATES, NotSampled, Sampled, SamplingParams, draw, sample

VOCAB = 50


def random_logits(batch: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))


def drawn_tokens(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """The first tokens of a request whose logits never change."""
    return tokens(sample(logits.expand(count, -1), [params] * count, range(count)))


def tokens(results: list[Sampled | NotSampled]) -> list[int]:
    """The tokens of a batch in which every request has one."""
    sampled = [result for result in results if isinstance(result, Sampled)]
    assert len(sampled) == len(results)
    return [each.token_id for each in sampled]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = random_logits(8)
    sampled = sample(logits, [SamplingParams(temperature=0.0)] * 8, [0] * 8)
    assert sampled == [Sampled(token_id) for token_id in logits.argmax(-1).tolist()]


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    logits = random_logits(3)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(temperature=0.0)]
    sampled = sample(logits, params, [0, 5, 0])
    assert tokens([sampled[0], sampled[2]]) == logits[[0, 2]].argmax(-1).tolist()
    assert sampled[1] == sample(logits[1:2], [SamplingParams(seed=3)], [5])[0]


def test_sampling_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(random_logits(1), [SamplingParams()], [0])


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 7, 1000]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logprobs=st.integers(0, 5),
    want_logprobs=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=6), step=st.integers(0, 2**31), data_seed=st.integers(0, 99)
)
def test_a_token_depends_on_nothing_but_its_own_request(
    params: list[SamplingParams], step: int, data_seed: int
) -> None:
    # More tokens than candidates; some rows so flat that the candidates do not decide.
    logits = random_logits(len(params), data_seed, vocab=CANDIDATES + 500)
    logits[::2] *= 0.1
    steps = [step + row for row in range(len(params))]
    together = sample(logits, params, steps)
    alone = [sample(logits[row : row + 1], params[row : row + 1], [steps[row]])[0] for row in range(len(params))]
    assert tokens(together) == tokens(alone)


def test_seeds_and_steps_select_different_random_numbers() -> None:
    logits = torch.zeros(1, VOCAB)
    streams = {seed: tuple(drawn_tokens(logits, SamplingParams(seed=seed), 20)) for seed in range(20)}
    assert len(set(streams.values())) == 20
    assert all(len(set(stream)) > 5 for stream in streams.values())


@settings(max_examples=30, deadline=None)
@given(top_k=st.integers(1, VOCAB + 5), top_p=st.floats(0.01, 1.0), data_seed=st.integers(0, 99))
def test_only_tokens_within_top_k_and_top_p_are_drawn(top_k: int, top_p: float, data_seed: int) -> None:
    logits = random_logits(1, data_seed)
    likeliest = logits[0].argsort(descending=True)[:top_k]
    probabilities = logits[0, likeliest].double().softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    # A token whose predecessors make up top_p to the last bit may go either way.
    allowed = likeliest[(likelier < top_p + 1e-9) | (torch.arange(len(likeliest)) == 0)].tolist()
    assert set(drawn_tokens(logits, SamplingParams(top_k=top_k, top_p=top_p, seed=1), 60)) <= set(allowed)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(seed=0), [0.1, 0.2, 0.3, 0.4]),
        (SamplingParams(seed=0, temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (SamplingParams(seed=0, top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (SamplingParams(seed=0, top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (SamplingParams(seed=0, top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        # top_p counts the probabilities that top_k leaves: 4/7 alone reach one half.
        (SamplingParams(seed=0, top_k=2, top_p=0.5), [0, 0, 0, 1]),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    draws = 20_000
    drawn = drawn_tokens(torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), params, draws)
    for token, probability in enumerate(expected):
        deviation = 4 * math.sqrt(draws * probability * (1 - probability))
        assert abs(drawn.count(token) - draws * probability) <= deviation


def exact_tokens(logits: torch.Tensor, params: SamplingParams, step: int) -> set[int]:
    """What inverse transform sampling in float64 picks with the step's random number, and with neighbours of it."""
    assert params.seed is not None
    ordered, order = (logits.double() / params.temperature).sort(descending=True, stable=True)
    probabilities = ordered[: params.top_k if params.top_k > 0 else None].softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    stay = max(1, int((likelier < params.top_p).sum()))
    kept = torch.zeros(len(logits), dtype=torch.float64)
    kept[order[:stay]] = probabilities[:stay]
    cumulative = kept.cumsum(-1) / kept.sum()
    uniform = (np.random.Philox(key=params.seed, counter=step).random_raw() >> np.uint64(11)) * 2.0**-53
    nearby = torch.tensor([uniform - 1e-6, uniform, uniform + 1e-6], dtype=torch.float64).clamp(0, 1 - 1e-9)
    return set(torch.searchsorted(cumulative, nearby, right=True).tolist())


@pytest.mark.parametrize("scale", [3.0, 0.01], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5),
        SamplingParams(seed=5, temperature=0.5, top_p=0.9),
        SamplingParams(seed=5, top_k=40),
        SamplingParams(seed=5, top_k=40, top_p=0.3),
        SamplingParams(seed=5, top_k=CANDIDATES),
        SamplingParams(seed=5, top_k=CANDIDATES + 1),
        SamplingParams(seed=5, top_k=CANDIDATES + 300, top_p=0.99),
    ],
    ids=str,
)
def test_tokens_are_those_of_exact_arithmetic(params: SamplingParams, scale: float) -> None:
    """In vocabularies larger than the candidates, with the many equal logits that bfloat16 has."""
    logits = (scale * random_logits(1, vocab=3 * CANDIDATES)).bfloat16().float()
    for step, token in enumerate(drawn_tokens(logits, params, 100)):
        assert token in exact_tokens(logits[0], params, step)


def test_of_equally_likely_tokens_the_first_stay() -> None:
    logits = torch.tensor([[0.0, 1.0, -9.0, 1.0, 0.0, 0.0]])
    assert set(drawn_tokens(logits, SamplingParams(seed=1, top_k=3), 60)) == {0, 1, 3}
    assert set(drawn_tokens(torch.zeros(1, 8), SamplingParams(seed=1, top_p=0.5), 60)) == {0, 1, 2, 3}


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(nonsense: float, row: int) -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=2, want_logprobs=True),
        SamplingParams(seed=1, top_k=5, logprobs=2, want_logprobs=True),
        SamplingParams(seed=2),
    ]
    logits = random_logits(3)
    expected = sample(logits, params, [0] * 3)
    logits[row, 7] = nonsense
    results = sample(logits, params, [0] * 3)
    assert results.pop(row) == NotSampled("the model's logits are not finite numbers")
    del expected[row]
    assert results == expected


def test_what_few_candidates_do_not_decide_is_decided_by_all() -> None:
    logits = random_logits(40)
    params = [SamplingParams(seed=seed, top_k=seed % 30, top_p=0.5 + 0.01 * seed) for seed in range(40)]
    steps = range(40)
    assert (draw(logits, params, steps, candidates=4)[:, 0] < 0).any()
    assert sample(logits, params, steps, candidates=4) == sample(logits, params, steps)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = 100 * random_logits(1)
    assert set(drawn_tokens(logits, SamplingParams(temperature=temperature, seed=1), 20)) == {int(logits.argmax())}


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    logits = random_logits(4)
    params = [
        SamplingParams(temperature=0.0, logprobs=3, want_logprobs=True),
        SamplingParams(temperature=2.0, top_k=2, seed=1, logprobs=5, want_logprobs=True),
        SamplingParams(seed=1),
        SamplingParams(seed=1, want_logprobs=True),
    ]
    sampled = sample(logits, params, [0] * 4)
    expected = logits.log_softmax(-1)
    assert sampled[2] == Sampled(tokens(sampled)[2])
    for row, count in ((0, 3), (1, 5), (3, 0)):
        result = sampled[row]
        assert isinstance(result, Sampled)
        assert result.logprob == pytest.approx(float(expected[row, result.token_id]))
        best = expected[row].topk(count)
        assert result.top is not None
        assert [token for token, _ in result.top] == best.indices.tolist()
        assert [value for _, value in result.top] == pytest.approx(best.values.tolist())
