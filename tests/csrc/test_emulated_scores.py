"""The score and attention kernels' own sources, run on the CPU with tensor cores emulated, against float64."""

import math

import pytest
import torch

from kernels.attend_items import TILE_HEADS, ItemsToAttend, launch_params
from kernels.kv_format import PUBLISHED
from kernels.score_keys import (
    PageScoreSpecialization,
    PagesToScore,
    PromptScoreSpecialization,
    PromptToScore,
    _cut,
    page_params,
    prompt_params,
)
from kvcache.format import Fp8Format, quantise
from tests.csrc.emulator import COMPILER, EmulatedKernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FORMAT = Fp8Format(latent_dim=512, rope_dim=64, index_dim=128)
UNTOUCHED = 12345.0


def pages_of(
    lengths: list[int], max_pages: int, page_size: int, heads: int, each: int
) -> tuple[PagesToScore, torch.Tensor]:
    """Shuffled pages, and exact scores [batch * each, width]; what lies behind a sequence's end is NaN.

    lengths: of the sequences, up to their last query; the others end a token earlier each, or are not there.
    """
    generator = torch.Generator().manual_seed(len(lengths) * heads)
    batch, width = len(lengths), max_pages * page_size
    queries, scales = quantise(torch.randn(batch * each, heads, 128, generator=generator), 128)
    weights = torch.randn(batch * each, heads, generator=generator) * scales.squeeze(-1)
    keys = torch.full((batch * max_pages, page_size, FORMAT.index_key_bytes), 0xFF, dtype=torch.uint8)
    table = torch.randperm(len(keys), generator=generator).view(batch, max_pages)
    exact = torch.full((batch * each, width), UNTOUCHED, dtype=torch.float64)
    of_queries = [max(0, length - before) for length in lengths for before in reversed(range(each))]
    for row, length in enumerate(lengths):
        stored = FORMAT.encode_index_keys(torch.randn(length, 128, generator=generator) * 3 ** (row % 4))
        positions = torch.arange(length)
        keys[table[row, positions // page_size], positions % page_size] = stored
        for query in range(row * each, (row + 1) * each):
            products = (queries[query].double() @ FORMAT.index_keys(stored).double().T * 128**-0.5).relu()
            exact[query, :length] = weights[query].double() @ products
    rows = table.repeat_interleave(each, 0)
    return PagesToScore(queries, weights, keys, rows, torch.tensor(of_queries), each), exact


@pytest.mark.parametrize(
    ("lengths", "max_pages", "page_size", "heads", "blocks", "stages", "each"),
    [
        ([200], 4, 64, 64, 1, 2, 1),
        ([130, 0, 64, 1], 3, 64, 32, 2, 3, 1),
        ([17, 90, 33], 7, 16, 32, 3, 1, 1),
        ([0, 0], 2, 64, 32, 2, 2, 1),
        ([100] * 40, 1, 128, 32, 5, 2, 1),
        ([1, 0, 16] * 45, 1, 16, 32, 2, 2, 1),
        ([9000, 5001], 141, 64, 32, 2, 3, 1),  # pages are looked up several times
        # Queries of one request are scored together.
        ([200, 1, 0, 70], 6, 64, 64, 1, 2, 4),
        ([130, 0, 64, 3], 6, 64, 32, 2, 2, 2),
        ([17, 90, 333], 6, 64, 32, 3, 2, 3),
    ],
)
def test_scores(
    lengths: list[int], max_pages: int, page_size: int, heads: int, blocks: int, stages: int, each: int
) -> None:
    given, exact = pages_of(lengths, max_pages, page_size, heads, each)
    assert given.fits()
    scores = torch.full(exact.shape, UNTOUCHED)
    block_size = 128 if sum(lengths) > 9000 or len(lengths) > 100 else 256
    specialization = PageScoreSpecialization(heads, stages, block_size, each)
    shared_bytes = specialization.shared_bytes_for(len(lengths))
    EmulatedKernel(specialization).launch(page_params(given, scores), (blocks, 1, 1), shared_bytes=shared_bytes)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("start", "num_queries", "heads", "per_block", "stages"),
    [(0, 1, 64, 4, 3), (70, 11, 32, 8, 2), (130, 9, 64, 12, 3)],
)
def test_scores_of_a_prompt(start: int, num_queries: int, heads: int, per_block: int, stages: int) -> None:
    generator = torch.Generator().manual_seed(start)
    queries, scales = quantise(torch.randn(num_queries, heads, 128, generator=generator), 128)
    weights = torch.randn(num_queries, heads, generator=generator) * scales.squeeze(-1)
    keys = FORMAT.encode_index_keys(torch.randn(start + num_queries, 128, generator=generator))
    products = (queries.double() @ FORMAT.index_keys(keys).double().T * 128**-0.5).relu()
    exact = torch.einsum("nh,nhk->nk", weights.double(), products)
    exact.masked_fill_(torch.arange(len(keys)) > start + torch.arange(num_queries)[:, None], UNTOUCHED)
    given = PromptToScore(queries, weights, keys, start)
    assert given.fits()
    scores = torch.full(exact.shape, UNTOUCHED)
    grid = (-(-len(keys) // 128), -(-num_queries // per_block), 1)  # 64 keys for each of two warpgroups
    params = prompt_params(given, scores, per_block)
    EmulatedKernel(PromptScoreSpecialization(heads, stages, block_size=256)).launch(params, grid)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (5, 300), (512, 32768), (8192, 8192), (3, 1000000)])
def test_all_queries_and_keys_of_a_prompt_have_a_block(num_queries: int, num_keys: int) -> None:
    (of_keys, of_queries), per_block = _cut(num_queries, num_keys, 528)
    assert 256 * (of_keys - 1) < num_keys <= 256 * of_keys
    assert per_block * (of_queries - 1) < num_queries <= per_block * of_queries
    assert per_block % 4 == 0


SCALE = 576**-0.5


def attend(given: ItemsToAttend) -> torch.Tensor:
    """What the kernel computes, of whole queries: float64 [N, heads, 512]."""
    EmulatedKernel(given.kernel).launch(launch_params(given), given.grid)
    weights = (given.log_sums.double() * math.log(2)).softmax(-1).nan_to_num(0.0)
    return (given.partial.double() * weights[..., None]).sum(2)


def exact(given: ItemsToAttend) -> torch.Tensor:
    """The same, plainly."""
    found = torch.zeros(*given.queries.shape[:2], 512, dtype=torch.float64)
    for number, rows in enumerate(given.rows):
        items = given.items[rows[rows >= 0]]
        items = (FORMAT.items(items) if items.dtype == torch.uint8 else items).double()
        if len(items):
            weights = (given.queries[number].double() @ items.T * SCALE).softmax(-1)
            found[number] = weights @ items[:, :512]
    return found


def made(
    heads: int,
    rows: torch.Tensor,
    splits: int,
    dtype: torch.dtype,
    growth: float = 0.0,
    num_items: int = 300,
    fp8: bool = True,
) -> ItemsToAttend:
    """Random items, of which the last is no number. growth: of items from the first to the last."""
    generator = torch.Generator().manual_seed(heads)
    size = 1 + growth * torch.arange(num_items)[:, None] / num_items
    items = torch.randn(num_items, 576, generator=generator) * size
    items = FORMAT.encode_items(items) if fp8 else items.bfloat16()
    items[-1] = 0xFF if fp8 else torch.nan
    tiles = -(-rows.shape[1] // 64)
    per_split = -(-tiles // splits)
    splits = -(-tiles // per_split)
    queries = torch.randn(len(rows), heads, 576, generator=generator).bfloat16() * 2
    partial = torch.full((len(rows), heads, splits, 512), torch.nan, dtype=dtype)
    log_sums = torch.full((len(rows), heads, splits), torch.nan)
    return ItemsToAttend(queries, items, rows, partial, log_sums, per_split * 64, SCALE * math.log2(math.e))


def test_items_are_those_of_the_format() -> None:
    assert FORMAT.item_bytes == PUBLISHED.item_bytes


@pytest.mark.parametrize("fp8", [True, False])
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
def test_attention(heads: int, k: int, splits: int, dtype: torch.dtype, growth: float, fp8: bool) -> None:
    rows = torch.arange(k).expand(2, k).clone()
    rows[1, ::3] = -1
    given = made(heads, rows, splits, dtype, growth, fp8=fp8)
    assert given.grid == (2 * -(-heads // TILE_HEADS), given.partial.shape[2], 1)
    wanted = exact(given)
    torch.testing.assert_close(attend(given), wanted, rtol=0.02, atol=0.01 * wanted.abs().max().item())


@pytest.mark.parametrize("fp8", [True, False])
def test_no_rows_are_attended_to_as_nothing_and_what_is_nan_stays_so(fp8: bool) -> None:
    rows = torch.full((2, 70), -1)
    rows[1, 3] = 299
    given = made(64, rows, 1, torch.bfloat16, fp8=fp8)
    EmulatedKernel(given.kernel).launch(launch_params(given), given.grid)
    assert given.partial[0].eq(0).all()
    assert given.log_sums[0].isneginf().all()
    assert given.partial[1].isnan().all()
