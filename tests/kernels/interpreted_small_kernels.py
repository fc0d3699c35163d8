"""The kernels of routers and indexers in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import kernels.triton
from kernels import ops, torch_ops
from kernels.operands import IndexQueries, LayerNorm, Pair, PartialSums, RmsNorm, Rope, RouterConfig
from kernels.triton.encode import decode_items, encode_index_keys, encode_index_queries, encode_items
from kernels.triton.gumbel import perturb
from kernels.triton.router import choose_experts, partial_products
from kvcache.format import Fp8Format, quantise, rotate
from model.feed_forward import Router
from model.shard import RoutedTokens
from tests.kernels.fp8_cases import randn
from tests.model.test_attention import random_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "rows", "channels"), [(1, 64, 512), (3, 20, 300), (70, 256, 264), (0, 4, 64)])
def test_partial_products_add_up_to_the_product(tokens: int, rows: int, channels: int, dtype: torch.dtype) -> None:
    x = randn(tokens, channels + 8).bfloat16()[:, 8:]
    weight = randn(rows, channels, seed=1).to(dtype)
    parts = partial_products(x, weight)
    assert parts.shape == (-(-channels // 256), tokens, rows)
    torch.testing.assert_close(
        parts.double().sum(0), x.double() @ weight.double().t(), rtol=1e-6, atol=1e-6 * channels**0.5
    )


def test_factors_that_do_not_fit_together_are_refused() -> None:
    x, weight = randn(2, 64).bfloat16(), randn(16, 64).bfloat16()
    for wrong in ((x, weight[:, :32]), (x.t().contiguous().t(), weight), (x, randn(64, 16).bfloat16().t())):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            partial_products(*wrong)
    with pytest.raises(ValueError, match="expected bfloat16 times"):
        partial_products(x.float(), weight)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "normalise"),
    [(32, 8, 8, 4, True), (256, 8, 8, 4, True), (256, 8, 1, 1, True), (30, 5, 3, 2, False), (8, 2, 1, 1, True)],
)
def test_the_choice_adds_up_logits(experts: int, top_k: int, groups: int, top_groups: int, normalise: bool) -> None:
    config = RouterConfig(experts, top_k, groups, top_groups, normalise, scale=2.5)
    rule = Router(torch.empty(0), 0.1 * randn(experts, seed=1), config)
    logits = PartialSums(randn(3, 9, experts), 0.5)
    weights, ids = choose_experts(logits, rule.bias, config)
    their_weights, their_ids = torch_ops.choose_experts(logits, rule.bias, config)
    assert torch.equal(ids.sort(-1).values, their_ids.sort(-1).values)
    empty = torch.zeros(9, experts)
    torch.testing.assert_close(empty.scatter(1, ids, weights), empty.scatter(1, their_ids, their_weights))
    ranks = (logits.reduce().sigmoid() + rule.bias).gather(1, ids)
    assert (ranks.diff() <= 1e-6).all(), "the best come first"


def test_the_choice_is_written_into_rows() -> None:
    rule = Router(torch.empty(0), 0.1 * randn(32, seed=1), RouterConfig(32, 3, 8, 4, True, scale=2.5))
    logits, tokens = PartialSums(randn(3, 5, 32)), RoutedTokens.empty(7, 128, 3, torch.device("cpu"))
    tokens.rows.fill_(0x55)
    choose_experts(logits, rule.bias, rule.config, tokens[1:-1].choice)
    weights, ids = torch_ops.choose_experts(logits, rule.bias, rule.config)
    written, empty = tokens[1:-1], torch.zeros(5, 32)
    ours = empty.scatter(1, written.ids.long(), written.weights)
    torch.testing.assert_close(ours, empty.scatter(1, ids, weights))
    begin = 128 + 4
    untouched = torch.cat([tokens.rows[1:-1, :begin], tokens.rows[1:-1, begin + 2 * 3 * 4 :]], 1)
    assert (untouched == 0x55).all()
    assert (tokens.rows[[0, -1]] == 0x55).all()
    with pytest.raises(ValueError, match="expected float32 weights"):
        choose_experts(logits, rule.bias, rule.config, tokens.choice)


@pytest.mark.parametrize("named", [False, True])
def test_noise_is_torchs(named: bool) -> None:
    scores, temperature = randn(3, 1500), torch.tensor([0.7, 0.0, 1.0])
    scores[0, 3:9] = float("-inf")
    keys = torch.tensor([5, -(2**62), 2**63 - 1])
    tokens = torch.randperm(1500) if named else None
    noisy = perturb(scores, temperature, keys, tokens)
    torch.testing.assert_close(noisy, torch_ops.perturb(scores, temperature, keys, tokens))
    assert torch.equal(noisy[1], scores[1])


@pytest.mark.parametrize("ops", [choose_experts, torch_ops.choose_experts])
def test_padding_chooses_no_experts(ops: Callable[..., Pair]) -> None:
    rule = Router(torch.empty(0), torch.zeros(32), RouterConfig(32, 3, 8, 4, True, scale=2.5))
    logits, positions = PartialSums(randn(3, 5, 32)), torch.tensor([7, -1, 0, -1, 3])
    _, ids = ops(logits, rule.bias, rule.config, positions=positions)
    _, of_tokens = ops(logits, rule.bias, rule.config)
    assert (ids[positions < 0] == -1).all()
    assert torch.equal(ids[positions >= 0], of_tokens[positions >= 0])


@pytest.mark.parametrize("tokens", [1, 19])
def test_a_router_makes_and_adds_up_parts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, config = (0.05 * randn(32, 600, seed=1)).bfloat16(), RouterConfig(32, 4, 4, 2, True, scale=2.5)
    rule = Router(weight, 0.1 * randn(32, seed=2), config)
    hidden = randn(tokens, 600).bfloat16()
    their_weights, their_ids = rule.route(hidden)
    monkeypatch.setattr(ops, "ops_on", lambda device: kernels.triton)
    weights, ids = rule.route(hidden)
    empty = torch.zeros(tokens, 32)
    torch.testing.assert_close(empty.scatter(1, ids, weights), empty.scatter(1, their_ids, their_weights))


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 256), float("nan"))
    logits[1, 7:] = 1.0
    _, ids = choose_experts(PartialSums.of(logits), torch.zeros(256), RouterConfig(256, 8, 8, 4, True, 1.0))
    assert ((ids >= 0) & (ids < 256)).all()


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 64, 128), (3, 32, 32), (5, 6, 16)])
def test_index_queries_are_rotated_and_head_weights_added_up(tokens: int, heads: int, dim: int) -> None:
    index = IndexQueries(
        randn(tokens, heads, dim).bfloat16(), PartialSums(randn(5, tokens, heads, seed=1), heads**-0.5)
    )
    encoded = encode_index_queries(index)
    expected, scales = quantise(rotate(index.queries), dim)
    torch.testing.assert_close(encoded.head_weights, index.head_weights * scales.squeeze(-1), rtol=1e-5, atol=1e-7)
    assert (encoded.queries.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.995
    assert (encoded.queries.float() - expected.float()).norm() <= 0.01 * expected.float().norm()
    later = encode_index_queries(index[tokens // 2 :])
    assert torch.equal(later.head_weights, encoded.head_weights[tokens // 2 :]), "whoever else is in the batch"


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (132, 10)])
def test_items_are_the_formats_bytes(latent_dim: int, rope_dim: int) -> None:
    tokens, kv_format = 7, Fp8Format(latent_dim, rope_dim, index_dim=16)
    compressed, weight = randn(tokens, latent_dim + rope_dim).bfloat16(), 1 + 0.1 * randn(latent_dim, seed=1).bfloat16()
    angles = 6 * torch.rand(tokens, 1, rope_dim // 2)
    rope = Rope(angles.cos().bfloat16(), angles.sin().bfloat16())
    compressed[5, 3], compressed[6, 3] = float("nan"), float("inf")
    written = encode_items(compressed, RmsNorm(weight, 1e-6), rope, kv_format)

    latent, key = compressed.double().split((latent_dim, rope_dim), -1)
    normed = F.rms_norm(latent, (latent_dim,), weight.double(), 1e-6).float()
    exact = Rope(rope.cos.double(), rope.sin.double())
    roped = torch_ops.rotate(key.unsqueeze(1), normed.unsqueeze(1), exact, interleaved=True, beside_first=True)
    roped = roped.squeeze(1).float()
    read, expected = kv_format.items(written), kv_format.items(kv_format.encode_items(roped))
    # A number between two of float8_e4m3 may be rounded to either.
    assert (read[:5] == expected[:5]).float().mean() > 0.998
    scales = written.view(torch.float32)[:, latent_dim // 4 : latent_dim // 4 + kv_format.num_scales]
    assert torch.equal(torch.frexp(scales[:5]).mantissa, torch.full_like(scales[:5], 0.5))
    assert scales[5:].isnan().all()

    rows = torch.tensor([4, 0, 5, 3, 3])
    decoded, expected = decode_items(written, rows, kv_format), kv_format.items_at(written, rows).bfloat16()
    assert torch.equal(decoded.nan_to_num(9.0), expected.nan_to_num(9.0)), "a scale is a power of two"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [128, 32])
def test_index_keys_are_the_formats_bytes(dim: int, interleaved: bool) -> None:
    tokens, rope_dim = 5, dim // 2
    kv_format = Fp8Format(latent_dim=128, rope_dim=rope_dim, index_dim=dim)
    projected, weight = randn(tokens, dim).bfloat16(), 1 + 0.1 * randn(dim, seed=1).bfloat16()
    bias, angles = 0.1 * randn(dim, seed=2).bfloat16(), 6 * torch.rand(tokens, 1, rope_dim // 2)
    rope = Rope(angles.cos().bfloat16(), angles.sin().bfloat16())
    written = encode_index_keys(projected, LayerNorm(weight, bias, 1e-6), rope, interleaved, kv_format)
    normed = F.layer_norm(projected.double(), (dim,), weight.double(), bias.double(), 1e-6).unsqueeze(1)
    exact = Rope(rope.cos.double(), rope.sin.double())
    rotated, rest = normed.tensor_split((rope_dim,), -1)
    keys = torch_ops.rotate(rotated, rest, exact, interleaved=interleaved, beside_first=False)
    expected = kv_format.index_keys(kv_format.encode_index_keys(keys.squeeze(1).bfloat16()))
    assert (kv_format.index_keys(written) - expected).norm() <= 0.02 * expected.norm()


def test_many_queries_are_absorbed_in_place_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, latents, rope = random_attention(torch.device("cpu"), torch.float32, tokens=10)
    query_nope, query_rope = latents.view(10, 4, -1).tensor_split((128,), -1)
    expected = torch_ops.absorb(query_nope, query_rope, attention.key_map, rope)
    monkeypatch.setattr(kernels.triton, "MANY_QUERIES", 10)
    queries = kernels.triton.absorb(query_nope, query_rope, attention.key_map, rope)
    assert queries.is_contiguous()
    torch.testing.assert_close(queries, expected)
