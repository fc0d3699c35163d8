"""The fp8 format against its definition, and how far what is read back is from what was written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.format import Fp8Format, rotate
from tests.fp8_reference import ITEM_SCALE_BITS, hadamard, rounded

PUBLISHED = Fp8Format(latent_dim=512, rope_dim=64, index_dim=128)
TINY = Fp8Format(latent_dim=48, rope_dim=16, index_dim=32)
ODD = Fp8Format(latent_dim=260, rope_dim=2, index_dim=4)


any_vectors = given(
    kv_format=st.sampled_from([PUBLISHED, TINY, ODD]),
    count=st.integers(1, 5),
    magnitude=st.floats(-8, 8),
    seed=st.integers(0, 999),
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_sizes() -> None:
    assert (PUBLISHED.item_bytes, PUBLISHED.index_key_bytes) == (656, 132)
    assert (TINY.item_bytes, TINY.index_key_bytes) == (48 + 4 + 32, 36)
    assert (ODD.item_bytes, ODD.num_scales) == (260 + 3 * 4 + 4, 3)
    assert PUBLISHED.name == "fp8_e4m3"


@pytest.mark.parametrize(
    "widths", [(510, 64, 128), (512, 63, 128), (512, 64, 96), (512, 64, 2)], ids=["latent", "rope", "index", "narrow"]
)
def test_widths_without_a_layout_are_refused(widths: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="kv_lora_rank that is a multiple of 4"):
        Fp8Format(*widths)


@settings(max_examples=60)
@any_vectors
def test_items_are_read_back_as_defined(kv_format: Fp8Format, count: int, magnitude: float, seed: int) -> None:
    latents = randn(count, kv_format.latent_dim, seed=seed) * 10**magnitude
    ropes = randn(count, kv_format.rope_dim, seed=seed + 1)
    stored = kv_format.encode_items(torch.cat((latents, ropes), -1))
    assert stored.shape == (count, kv_format.item_bytes)
    assert stored.dtype == torch.uint8
    read = kv_format.items(stored)
    assert torch.equal(read, torch.cat((rounded(latents, 128, ITEM_SCALE_BITS), ropes.bfloat16().float()), -1))
    # Of two neighbours in float8_e4m3 the nearer one, or a step of the least ones: 2**-4 of the number, 2**-10 steps.
    dim, groups = kv_format.latent_dim, kv_format.num_scales
    scales = stored[:, dim : dim + 4 * groups].contiguous().view(torch.float32)
    assert torch.equal(scales.log2(), scales.log2().round()), "powers of two"
    largest = torch.stack([part.abs().amax(-1) for part in latents.split(128, -1)], -1).clamp(min=1e-4)
    assert ((largest <= 448 * scales) & (224 * scales < largest * (1 + 1e-6))).all(), "the least that hold all numbers"
    bound = torch.maximum(latents.abs() * 2**-4, scales.repeat_interleave(128, -1)[:, :dim] * 2**-10)
    assert ((read[:, : kv_format.latent_dim] - latents).abs() <= bound * (1 + 1e-5)).all()


@settings(max_examples=60)
@any_vectors
def test_index_keys_are_read_back_rotated(kv_format: Fp8Format, count: int, magnitude: float, seed: int) -> None:
    dim = kv_format.index_dim
    keys = randn(count, dim, seed=seed) * 10**magnitude
    stored = kv_format.encode_index_keys(keys)
    assert stored.shape == (count, kv_format.index_key_bytes)
    torch.testing.assert_close(kv_format.index_keys(stored), rounded(rotate(keys), dim), rtol=0, atol=0)
    # The product with a rotated query is that with the query, as far as rounding goes.
    query = randn(1, dim, seed=seed + 1)
    products = kv_format.index_queries(query) @ kv_format.index_keys(stored).T
    exact = query.double() @ keys.double().T
    bound = keys.norm(dim=-1).clamp(min=1e-4) * query.norm() * 2**-4
    assert ((products - exact).abs() <= bound).all()


@pytest.mark.parametrize("dim", [4, 32, 128])
def test_the_rotation_is_sylvesters_matrix(dim: int) -> None:
    vectors = randn(7, 3, dim)
    torch.testing.assert_close(rotate(vectors), vectors @ hadamard(dim))
    torch.testing.assert_close(rotate(rotate(vectors)), vectors)
    assert torch.equal(rotate(vectors)[:1, 1], rotate(vectors[:1, 1]))


def test_one_outlier_does_not_drown_an_index_key() -> None:
    """What the rotation is for: unrotated, everything beside the outlier would be rounded to the outlier's scale."""
    key = randn(1, 128) * 1e-3
    key[0, 5] = 100.0
    read = rotate(PUBLISHED.index_keys(PUBLISHED.encode_index_keys(key)))
    assert (read - key).abs().max() < 100 * 2**-4
    assert rounded(key, 128)[0, :5].abs().max() < 448 * 2**-4


def test_zeros_are_zeros_and_what_is_not_finite_is_nan() -> None:
    items = torch.zeros(3, 576)
    items[1, 130], items[2, 0] = float("nan"), float("inf")
    read = PUBLISHED.items(PUBLISHED.encode_items(items))
    assert (read[0] == 0).all()
    assert read[1, 130].isnan()
    assert read[2, 0].isnan()
    keys = torch.zeros(1, 128)
    keys[0, 3] = float("nan")
    assert PUBLISHED.index_keys(PUBLISHED.encode_index_keys(keys)).isnan().any()


def test_rows_of_a_pool_a_single_vector_anywhere_and_none_are_read() -> None:
    stored = TINY.encode_items(randn(9, 64))
    items = TINY.items(stored)
    rows = torch.tensor([[3, 3, 0], [8, 1, 2]])
    assert torch.equal(TINY.items_at(stored, rows), items[rows])
    assert torch.equal(TINY.items(stored[2:3]), items[2:3])
    assert torch.equal(TINY.items(stored[2]), items[2])
    assert PUBLISHED.items(PUBLISHED.encode_items(randn(0, 576))).shape == (0, 576)
    assert PUBLISHED.index_keys(PUBLISHED.encode_index_keys(randn(0, 128))).shape == (0, 128)
