"""The Triton attention backend against the torch one and against float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels.attention import AttentionBackend, triton_backend
from kernels.kv_format import KVFormat
from kernels.operands import IndexQueries, PagedKeys, Rope
from kvcache.format import DenseFormat

pytest.importorskip("triton")

from kernels.triton.attend import attend_rows

CUDA = torch.device("cuda", 0)
SCALING = 0.1
NUM_ROWS = 5000

# heads, latent_dim, rope_dim: the tiny models', odd ones, and those of the real models.
TINY, ODD, SMALL_SHARD, SINGLE_RANK = (4, 24, 16), (20, 48, 10), (16, 512, 64), (128, 512, 64)
SHAPES = [
    *((queries, dims, k) for queries in (1, 3, 64) for dims in (TINY, ODD) for k in (1, 33, 64, 257)),
    *((queries, SMALL_SHARD, k) for queries in (1, 4, 16, 64) for k in (100, 2048)),
    *((queries, SINGLE_RANK, k) for queries in (1, 17) for k in (1000, 2048)),
    (300, SINGLE_RANK, 130),
]


def dense(dtype: torch.dtype) -> KVFormat:
    """Of whatever width: reading it is a view."""
    return DenseFormat(dtype, item_dim=0, index_dim=0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(CUDA).manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, generator=generator(seed)).to(dtype)


def rope_of(tokens: int, rope_dim: int, dtype: torch.dtype) -> Rope:
    angles = 6 * torch.rand(tokens, rope_dim // 2, device=CUDA, generator=generator(11))
    return Rope(angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1))


def exactly(rope: Rope) -> Rope:
    return Rope(rope.cos.double(), rope.sin.double())


@dataclass(frozen=True)
class Rows:
    """Queries with rows of a pool, of which some are absent; rows that no query has hold NaN."""

    queries: torch.Tensor
    kv: torch.Tensor
    rows: torch.Tensor
    latent_dim: int

    def attend(self, backend: Callable[[KVFormat], AttentionBackend]) -> torch.Tensor:
        stored = self.kv.view(torch.uint8)
        return backend(dense(self.kv.dtype)).attend_rows(self.queries, stored, self.rows, SCALING, self.latent_dim)

    def exact(self) -> torch.Tensor:
        """By definition, in float64."""
        results = []
        for query, rows in zip(self.queries.double(), self.rows, strict=True):
            items = self.kv[rows[rows >= 0]].double()
            results.append((query @ items.T * SCALING).softmax(-1) @ items[:, : self.latent_dim])
        return torch.stack(results)


def some_rows(num_queries: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a pool [num_queries, k], of which some are absent, and which rows no query has: bool [NUM_ROWS]."""
    rows = torch.randint(1, NUM_ROWS, (num_queries, k), device=CUDA, generator=generator(1))
    absent = torch.rand(num_queries, k, device=CUDA, generator=generator(2)) < 0.2
    absent[:, 0] = False
    absent[-1, 1 + k // 2 :] = True  # a short sequence: whole tiles are absent
    rows[absent] = -1
    unused = torch.ones(NUM_ROWS, dtype=torch.bool, device=CUDA)
    unused[rows[rows >= 0]] = False
    return rows, unused


def random_rows(num_queries: int, dims: tuple[int, int, int], k: int, dtype: torch.dtype) -> Rows:
    heads, latent_dim, rope_dim = dims
    rows, unused = some_rows(num_queries, k)
    kv = randn(NUM_ROWS, latent_dim + rope_dim, dtype=dtype)
    kv[unused] = float("nan")
    return Rows(randn(num_queries, heads, latent_dim + rope_dim, dtype=dtype, seed=3), kv, rows, latent_dim)


@pytest.mark.parametrize(("num_queries", "dims", "k"), SHAPES)
def test_float32_agrees_with_torch(num_queries: int, dims: tuple[int, int, int], k: int) -> None:
    given = random_rows(num_queries, dims, k, torch.float32)
    torch.testing.assert_close(given.attend(triton_backend), given.attend(AttentionBackend), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("num_queries", "dims", "k"), SHAPES)
def test_bfloat16_is_as_exact_as_torch(num_queries: int, dims: tuple[int, int, int], k: int) -> None:
    given = random_rows(num_queries, dims, k, torch.bfloat16)
    exact = given.exact()
    ours, torchs = (given.attend(backend) for backend in (triton_backend, AttentionBackend))
    assert ours.dtype == torch.bfloat16
    our_error, torch_error = ((result.double() - exact).abs() for result in (ours, torchs))
    assert our_error.mean() <= 1.2 * torch_error.mean() + 1e-9
    assert our_error.max() <= 1.5 * torch_error.max() + 1e-9


def test_a_query_without_rows_is_finite() -> None:
    given = random_rows(3, SMALL_SHARD, 200, torch.bfloat16)
    given.rows[1] = -1
    attended = given.attend(triton_backend)
    assert attended.isfinite().all()
    assert (attended[1] == 0).all()
    none = Rows(given.queries[:0], given.kv, given.rows[:0], given.latent_dim)
    assert none.attend(triton_backend).shape == (0, 16, 512)


def test_pools_of_more_than_two_to_the_31_elements() -> None:
    last = 2**31 // 576 + 1000
    given = random_rows(2, SMALL_SHARD, 64, torch.bfloat16)
    kv = torch.empty(last + NUM_ROWS, 576, dtype=torch.bfloat16, device=CUDA)
    kv[last:] = given.kv
    far = Rows(given.queries, kv, torch.where(given.rows < 0, -1, given.rows + last), given.latent_dim)
    assert torch.equal(far.attend(triton_backend), given.attend(triton_backend))


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    given = random_rows(2, TINY, 10, torch.bfloat16)
    for wrong in (given.kv[:, :-1], given.kv.float(), given.kv.T.contiguous().T):
        with pytest.raises(ValueError, match="expected kv"):
            attend_rows(given.queries, wrong, given.rows, SCALING, given.latent_dim)


def index_queries(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> IndexQueries:
    return IndexQueries.of(
        queries=randn(tokens, heads, dim, dtype=dtype, seed=4),
        head_weights=randn(tokens, heads, seed=5),
    )


def random_pages(lengths: list[int], width: int, page_size: int, dim: int, dtype: torch.dtype) -> PagedKeys:
    """Shuffled pages; keys behind a sequence's end are NaN, and page table entries there name one such page."""
    num_pages = width // page_size
    keys = torch.full((len(lengths) * num_pages + 1, page_size, dim), float("nan"), dtype=dtype, device=CUDA)
    table = 1 + torch.randperm(len(lengths) * num_pages, device=CUDA, generator=generator(7)).view(len(lengths), -1)
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        mine = torch.full((used * page_size, dim), float("nan"), dtype=dtype, device=CUDA)
        mine[:length] = randn(length, dim, dtype=dtype, seed=8 + row)
        keys[table[row, :used]] = mine.view(used, page_size, dim)
        table[row, used:] = 0
    return PagedKeys(keys.view(torch.uint8), table, torch.tensor(lengths, device=CUDA))


def exact_scores(index: IndexQueries, row: int, keys: torch.Tensor) -> torch.Tensor:
    query, weights = index.queries[row].double(), index.head_weights[row].double()
    return weights @ (query @ keys.double().T * query.shape[-1] ** -0.5).relu()


def assert_best(selected: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
    """All positions that clearly belong to the top-k and none that clearly do not, once each."""
    positions = selected[selected >= 0]
    count = min(topk, len(scores))
    assert len(positions) == count == len(positions.unique())
    tolerance = 1e-5 * float(scores.abs().max())
    found = scores[positions]
    border = scores.topk(count).values[-1]
    assert (found >= border - tolerance).all()
    assert (torch.isin((scores > border + tolerance).nonzero().flatten(), positions)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "width", "page_size", "heads", "dim", "topk"),
    [
        ([13], 16, 1, 16, 8, 5),
        ([1, 63, 64, 65, 200], 208, 16, 32, 32, 64),
        ([40, 3000, 0, 700], 3072, 64, 24, 40, 256),
        ([5000, 20000], 32768, 64, 64, 128, 2048),
        ([100], 1024, 64, 130, 128, 2048),
        ([1000 + 37 * row for row in range(64)], 4096, 64, 64, 128, 512),
    ],
)
def test_a_decoded_token_selects_the_best_of_its_own_sequence(
    lengths: list[int], width: int, page_size: int, heads: int, dim: int, topk: int, dtype: torch.dtype
) -> None:
    index = index_queries(len(lengths), heads, dim, dtype)
    pages = random_pages(lengths, width, page_size, dim, dtype)
    selected = triton_backend(dense(dtype)).select_for_decode(index, pages, topk)
    assert selected.shape == (len(lengths), min(topk, width))
    assert selected.dtype == torch.int64
    for row, length in enumerate(lengths):
        keys = pages.keys[pages.page_table[row]].flatten(0, 1)[:length].view(dtype)
        if length == 0:
            assert (selected[row] == -1).all()
        else:
            assert_best(selected[row], exact_scores(index, row, keys), topk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "tokens", "heads", "dim", "topk"),
    [(0, 1, 16, 8, 4), (0, 70, 24, 40, 20), (100, 33, 16, 32, 64), (3000, 300, 64, 128, 2048)],
)
def test_a_prompt_token_selects_the_best_up_to_its_own(
    start: int, tokens: int, heads: int, dim: int, topk: int, dtype: torch.dtype
) -> None:
    index = index_queries(tokens, heads, dim, dtype)
    keys = randn(start + tokens, dim, dtype=dtype, seed=9)
    selected = triton_backend(dense(dtype)).select_for_prompt(
        index, keys.view(torch.uint8), start, start + tokens + 50, topk
    )
    assert selected.shape == (tokens, min(topk, start + tokens))
    for row in range(0, tokens, 7):
        assert_best(selected[row], exact_scores(index, row, keys[: start + row + 1]), topk)


def test_a_prompt_may_be_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = triton_backend(dense(torch.bfloat16))
    index = index_queries(100, 16, 32, torch.bfloat16)
    keys = randn(300, 32, dtype=torch.bfloat16, seed=9).view(torch.uint8)
    whole = backend.select_for_prompt(index, keys, 200, 300, 64)
    monkeypatch.setattr("kernels.triton.attention.SCORE_BLOCK_BYTES", 33 * 4 * 300)
    assert torch.equal(backend.select_for_prompt(index, keys, 200, 300, 64), whole)


def captured(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.parametrize("num_queries", [1, 16, 200])
def test_a_replay_attends_as_an_eager_call_does(num_queries: int) -> None:
    given = random_rows(num_queries, SMALL_SHARD, 2048, torch.bfloat16)
    rows = given.rows.clone()
    graph, result = captured(lambda: given.attend(triton_backend))
    given.rows.copy_(rows.roll(1, dims=1).flip(0))
    given.queries.copy_(given.queries.flip(0))
    graph.replay()
    assert torch.equal(result, given.attend(triton_backend))


def test_a_replay_selects_for_the_lengths_of_the_moment() -> None:
    lengths = [3000, 1200, 64]
    index, pages = index_queries(3, 64, 128, torch.bfloat16), random_pages(lengths, 4096, 64, 128, torch.bfloat16)
    backend = triton_backend(dense(torch.bfloat16))
    graph, result = captured(lambda: backend.select_for_decode(index, pages, 256))
    for shorter in (0, 5, 64):
        pages.seq_lens.copy_(torch.tensor(lengths) - shorter)
        graph.replay()
        assert torch.equal(result, backend.select_for_decode(index, pages, 256))
        assert (result.max(dim=1).values < pages.seq_lens.clamp(min=1)).all()
