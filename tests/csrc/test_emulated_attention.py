"""The attention kernel's own sources, run on the CPU with its tensor cores emulated, against float64."""

import math

import pytest
import torch

from kernels.attend_items import TILE_HEADS, AttendSpecialization, ItemsToAttend, launch_params
from kernels.kv_format import PUBLISHED
from kvcache.format import Fp8Format
from tests.csrc.emulator import COMPILER, EmulatedKernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FORMAT = Fp8Format(latent_dim=512, rope_dim=64, index_dim=128)
SCALE = 576**-0.5


def attend(given: ItemsToAttend) -> torch.Tensor:
    """What the kernel computes, of whole queries: float64 [N, heads, 512]."""
    EmulatedKernel(AttendSpecialization()).launch(launch_params(given), given.grid)
    weights = (given.log_sums.double() * math.log(2)).softmax(-1).nan_to_num(0.0)
    return (given.partial.double() * weights[..., None]).sum(2)


def exact(given: ItemsToAttend) -> torch.Tensor:
    """The same, plainly."""
    found = torch.zeros(*given.queries.shape[:2], 512, dtype=torch.float64)
    for number, rows in enumerate(given.rows):
        items = FORMAT.items(given.items[rows[rows >= 0]]).double()
        if len(items):
            weights = (given.queries[number].double() @ items.T * SCALE).softmax(-1)
            found[number] = weights @ items[:, :512]
    return found


def made(
    heads: int, rows: torch.Tensor, splits: int, dtype: torch.dtype, growth: float = 0.0, num_items: int = 300
) -> ItemsToAttend:
    """Random items, of which the last is no number. growth: of items from the first to the last."""
    generator = torch.Generator().manual_seed(heads)
    size = 1 + growth * torch.arange(num_items)[:, None] / num_items
    items = FORMAT.encode_items(torch.randn(num_items, 576, generator=generator) * size)
    items[-1] = 0xFF
    tiles = -(-rows.shape[1] // 64)
    per_split = -(-tiles // splits)
    splits = -(-tiles // per_split)
    queries = torch.randn(len(rows), heads, 576, generator=generator).bfloat16() * 2
    partial = torch.full((len(rows), heads, splits, 512), torch.nan, dtype=dtype)
    log_sums = torch.full((len(rows), heads, splits), torch.nan)
    return ItemsToAttend(queries, items, rows, partial, log_sums, per_split * 64, SCALE * math.log2(math.e))


def test_items_are_those_of_the_format() -> None:
    assert FORMAT.item_bytes == PUBLISHED.item_bytes


@pytest.mark.parametrize(
    ("heads", "k", "splits", "dtype", "growth"),
    [
        (64, 1, 1, torch.bfloat16, 0.0),
        (64, 200, 1, torch.bfloat16, 0.0),
        (128, 256, 1, torch.bfloat16, 3.0),  # weights become relative to another score several times
        (80, 130, 2, torch.float32, 0.0),
        (40, 256, 3, torch.float32, 1.0),
    ],
)
def test_attention(heads: int, k: int, splits: int, dtype: torch.dtype, growth: float) -> None:
    rows = torch.arange(k).expand(2, k).clone()
    rows[1, ::3] = -1
    given = made(heads, rows, splits, dtype, growth)
    assert given.grid == (2 * -(-heads // TILE_HEADS), given.partial.shape[2], 1)
    wanted = exact(given)
    torch.testing.assert_close(attend(given), wanted, rtol=0.02, atol=0.01 * wanted.abs().max().item())


def test_no_rows_are_attended_to_as_nothing_and_what_is_nan_stays_so() -> None:
    rows = torch.full((2, 70), -1)
    rows[1, 3] = 299
    given = made(64, rows, 1, torch.bfloat16)
    EmulatedKernel(AttendSpecialization()).launch(launch_params(given), given.grid)
    assert given.partial[0].eq(0).all()
    assert given.log_sums[0].isneginf().all()
    assert given.partial[1].isnan().all()
