"""Triton on fp8 KV: what it writes against the format's own torch, what it reads against float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.logits.forced import forced_logits
from kernels import torch_ops
from kernels.attention import AttentionBackend, triton_backend
from kernels.operands import IndexQueries, LayerNorm, PagedKeys, RmsNorm
from kernels.score_keys import PagesToScore, score_pages
from kvcache.format import Fp8Format, quantise, rotate
from model.families import FamilyName
from model.loader import load_model
from model.tiny import write_tiny_checkpoint

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from kernels.triton.attend import Splits, attend_fp8_rows
from kernels.triton.encode import encode_index_keys, encode_index_queries, encode_items
from kernels.triton.index_scores import StoredKeys, decode_scores, prompt_scores
from tests.gpu.test_attention_backends import (
    CUDA,
    NUM_ROWS,
    SCALING,
    captured,
    exactly,
    generator,
    index_queries,
    randn,
    rope_of,
    some_rows,
)

PUBLISHED = Fp8Format(latent_dim=512, rope_dim=64, index_dim=128)
TINY = Fp8Format(latent_dim=48, rope_dim=16, index_dim=32)
ODD = Fp8Format(latent_dim=260, rope_dim=10, index_dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_format", [PUBLISHED, TINY, ODD], ids=["published", "tiny", "odd"])
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_items_are_the_formats_bytes_of_the_exact_ones(tokens: int, kv_format: Fp8Format, dtype: torch.dtype) -> None:
    latent_dim, rope_dim = kv_format.latent_dim, kv_format.rope_dim
    compressed = (3 * randn(tokens, latent_dim + rope_dim + 8, dtype=dtype))[:, 8:]
    weight, rope = 1 + 0.1 * randn(latent_dim, dtype=dtype, seed=1), rope_of(tokens, rope_dim, dtype)
    written = encode_items(compressed, RmsNorm(weight, 1e-6), rope, kv_format)

    latent, key = compressed.double().split((latent_dim, rope_dim), -1)
    normed = F.rms_norm(latent, (latent_dim,), weight.double(), 1e-6)
    items = torch_ops.rotate(
        key.unsqueeze(1), normed.unsqueeze(1), exactly(rope), interleaved=True, beside_first=True
    ).squeeze(1)
    read, expected = kv_format.items(written), kv_format.items(kv_format.encode_items(items.float()))
    # A number between two of float8_e4m3 may be rounded to either, and a scale may differ in its last bits.
    same = (read - expected).abs() <= 1e-5 * expected.abs() + 1e-6
    assert same.float().mean() > 0.998
    assert ((read - items).abs() <= items.abs() * 2**-4 + normed.abs().amax() / 448 * 2**-9 + 1e-6).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kv_format", [PUBLISHED, TINY], ids=["published", "tiny"])
@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_index_keys_are_the_formats_bytes(tokens: int, kv_format: Fp8Format, interleaved: bool) -> None:
    dim, rope_dim = kv_format.index_dim, kv_format.rope_dim
    projected = randn(tokens, dim, dtype=torch.bfloat16)
    weight = 1 + 0.1 * randn(dim, dtype=torch.bfloat16, seed=1)
    bias = 0.1 * randn(dim, dtype=torch.bfloat16, seed=2)
    rope = rope_of(tokens, rope_dim, torch.bfloat16)
    written = encode_index_keys(projected, LayerNorm(weight, bias, 1e-6), rope, interleaved, kv_format)

    normed = F.layer_norm(projected.double(), (dim,), weight.double(), bias.double(), 1e-6).unsqueeze(1)
    turned, passed = normed.split((rope_dim, dim - rope_dim), -1)
    keys = torch_ops.rotate(turned, passed, exactly(rope), interleaved=interleaved, beside_first=False).squeeze(1)
    read, expected = (
        kv_format.index_keys(stored) for stored in (written, kv_format.encode_index_keys(keys.bfloat16()))
    )
    # An element that is rounded to another bfloat16 moves the whole key a little, and its scale with it.
    same = (read - expected).abs() <= 2e-3 * expected.abs() + 1e-6
    assert same.float().mean() > 0.98
    assert (read - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 64, 128), (3, 32, 32), (200, 20, 16), (5, 130, 128)])
def test_index_queries_are_rotated_and_their_scales_are_in_the_weights(tokens: int, heads: int, dim: int) -> None:
    index = index_queries(tokens, heads, dim, torch.bfloat16)
    encoded = encode_index_queries(index)
    expected, scales = quantise(rotate(index.queries), dim)
    torch.testing.assert_close(encoded.head_weights, index.head_weights * scales.squeeze(-1), rtol=1e-5, atol=1e-8)
    assert (encoded.queries.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.995
    difference = encoded.queries.float() - expected.float()
    assert difference.norm() <= 0.01 * expected.float().norm()


def test_nan_stays_nan() -> None:
    compressed = randn(2, 576, dtype=torch.bfloat16)
    compressed[1, 7] = float("nan")
    rope = rope_of(2, 64, torch.bfloat16)
    norm = RmsNorm(torch.ones(512, dtype=torch.bfloat16, device=CUDA), 1e-6)
    stored = encode_items(compressed, norm, rope, PUBLISHED)
    items = PUBLISHED.items(stored)
    assert items[0].isfinite().all()
    assert items[1].isnan().any()
    queries, rows = randn(2, 128, 576, dtype=torch.bfloat16), torch.tensor([[0], [1]], device=CUDA)
    for use_cuda_kernel in (True, False):
        attended = attend_fp8_rows(queries, stored, rows, SCALING, PUBLISHED, use_cuda_kernel)
        assert attended[0].isfinite().all()
        assert attended[1].isnan().all()


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    rope = rope_of(2, 64, torch.bfloat16)
    norm = RmsNorm(torch.ones(512, device=CUDA), 1e-6)
    for wrong in (randn(2, 575), randn(3, 576)):
        with pytest.raises(ValueError, match="expected"):
            encode_items(wrong, norm, rope, PUBLISHED)
    key_norm = LayerNorm(torch.ones(128, device=CUDA), torch.zeros(128, device=CUDA), 1e-6)
    with pytest.raises(ValueError, match="expected"):
        encode_index_keys(randn(2, 127), key_norm, rope, False, PUBLISHED)
    queries, rows = randn(2, 16, 576, dtype=torch.bfloat16), torch.zeros((2, 4), dtype=torch.int64, device=CUDA)
    with pytest.raises(ValueError, match="contiguous kv"):
        attend_fp8_rows(queries, torch.zeros((9, 652), dtype=torch.uint8, device=CUDA), rows, SCALING, PUBLISHED)
    with pytest.raises(ValueError, match="of bfloat16"):
        attend_fp8_rows(queries.float(), torch.zeros((9, 656), dtype=torch.uint8, device=CUDA), rows, 1.0, PUBLISHED)


def random_rows(num_queries: int, heads: int, kv_format: Fp8Format, k: int) -> tuple[torch.Tensor, ...]:
    """Queries, a pool and rows of it, of which some are absent; rows that no query has hold NaN."""
    dim = kv_format.latent_dim + kv_format.rope_dim
    rows, unused = some_rows(num_queries, k)
    # Scales that differ a lot between rows and within one.
    spread = 2 ** randn(NUM_ROWS, 1, seed=4) * 2 ** (0.5 * randn(1, dim, seed=5))
    kv = kv_format.encode_items(randn(NUM_ROWS, dim) * spread)
    kv[unused] = 0xFF
    return 0.1 * randn(num_queries, heads, dim, dtype=torch.bfloat16, seed=3), kv, rows


@pytest.mark.parametrize(
    ("num_queries", "heads", "kv_format", "k"),
    [
        *((queries, heads, PUBLISHED, 2048) for queries in (1, 4, 16, 64) for heads in (16, 64, 128)),
        *((queries, heads, PUBLISHED, k) for queries in (1, 3) for heads in (64, 128) for k in (1, 64, 100, 1000)),
        *((queries, 4, TINY, k) for queries in (1, 3, 64) for k in (1, 33, 64, 257)),
        (2, 20, ODD, 100),
        (2, 80, PUBLISHED, 300),
        (300, 128, PUBLISHED, 130),
    ],
)
def test_attention_is_as_exact_as_torch(num_queries: int, heads: int, kv_format: Fp8Format, k: int) -> None:
    queries, kv, rows = random_rows(num_queries, heads, kv_format, k)
    exact = []
    for query, own in zip(queries.double(), rows, strict=True):
        items = kv_format.items(kv[own[own >= 0]]).double()
        exact.append((query @ items.T * SCALING).softmax(-1) @ items[:, : kv_format.latent_dim])
    truth = torch.stack(exact)
    ours, torchs = (
        backend(kv_format).attend_rows(queries, kv, rows, SCALING, kv_format.latent_dim)
        for backend in (triton_backend, AttentionBackend)
    )
    assert ours.dtype == torch.bfloat16
    plain = attend_fp8_rows(queries, kv, rows, SCALING, kv_format, use_cuda_kernel=False)
    our_error, plain_error, torch_error = ((result.double() - truth).norm() for result in (ours, plain, torchs))
    assert our_error <= 1.2 * torch_error + 1e-9
    assert plain_error <= 1.2 * torch_error + 1e-9
    assert our_error <= 0.02 * truth.norm()


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_prompt_attends_as_exactly_as_torch(heads: int) -> None:
    """By positions, which lie in any rows. With more than 32 heads items are decoded before."""
    queries, kv, selected = random_rows(64, heads, PUBLISHED, 2048)
    rows = torch.randperm(NUM_ROWS, device=CUDA, generator=generator(6))
    positions = torch.where(selected < 0, -1, rows.argsort()[selected])
    rows = torch.cat((rows, rows.new_full((1,), -1)))
    ours, torchs = (
        backend(PUBLISHED).attend_prompt(queries, kv, rows, positions, SCALING, 512)
        for backend in (triton_backend, AttentionBackend)
    )
    truth = torch.zeros_like(ours, dtype=torch.float64)
    for number, own in enumerate(selected):
        items = PUBLISHED.items(kv[own[own >= 0]]).double()
        truth[number] = (queries[number].double() @ items.T * SCALING).softmax(-1) @ items[:, :512]
    assert (ours.double() - truth).norm() <= 1.2 * (torchs.double() - truth).norm()
    assert (ours.double() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.parametrize("most", [1, 2, 5, 32])
@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16])
def test_however_rows_are_split(most: int, partial: torch.dtype) -> None:
    queries, kv, rows = random_rows(3, 128, PUBLISHED, 2048)
    whole = attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED, splits=Splits(1)).float()
    attended = attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED, splits=Splits(most, partial)).float()
    assert (attended - whole).norm() <= (5e-3 if partial == torch.float32 else 1e-2) * whole.norm()


def test_a_query_without_rows_is_zero() -> None:
    queries, kv, rows = random_rows(3, 128, PUBLISHED, 200)
    rows[1] = -1
    attended = attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED)
    assert attended.isfinite().all()
    assert (attended[1] == 0).all()
    assert attend_fp8_rows(queries[:0], kv, rows[:0], SCALING, PUBLISHED).shape == (0, 128, 512)


@pytest.mark.parametrize("heads", [16, 128])
def test_pools_of_more_than_two_to_the_31_bytes(heads: int) -> None:
    last = 2**31 // 656 + 1000
    queries, kv, rows = random_rows(2, heads, PUBLISHED, 64)
    far = torch.empty(last + NUM_ROWS, 656, dtype=torch.uint8, device=CUDA)
    far[last:] = kv
    attended = attend_fp8_rows(queries, far, torch.where(rows < 0, -1, rows + last), SCALING, PUBLISHED)
    assert torch.equal(attended, attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED))


@pytest.mark.parametrize("num_queries", [1, 16, 200])
def test_a_replay_attends_as_an_eager_call_does(num_queries: int) -> None:
    queries, kv, rows = random_rows(num_queries, 128, PUBLISHED, 2048)
    kv[(kv == 0xFF).all(-1)] = 0  # the rows change below
    graph, result = captured(lambda: attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED))
    rows.copy_(rows.roll(1, dims=1).flip(0))
    queries.copy_(queries.flip(0))
    graph.replay()
    assert torch.equal(result, attend_fp8_rows(queries, kv, rows, SCALING, PUBLISHED))


def exact_scores(encoded: IndexQueries, keys: torch.Tensor, dim: int) -> torch.Tensor:
    """Float64 [N, num_keys], of encoded queries and decoded keys [num_keys, dim].

    Head by head: all of them at once would take 23 GB in the largest case.
    """
    total = torch.zeros(len(encoded.queries), len(keys), dtype=torch.float64, device=CUDA)
    for queries, weights in zip(
        encoded.queries.double().unbind(1), encoded.head_weights.double().unbind(1), strict=True
    ):
        total += weights[:, None] * (queries @ keys.double().T * dim**-0.5).relu()
    return total


def assert_scores(scores: torch.Tensor, exact: torch.Tensor) -> None:
    """Tensor cores add fp8 products with some 13 bits."""
    assert (scores.double() - exact).abs().max() <= 2e-3 * exact.abs().max() + 1e-6


def fp8_pages(
    lengths: list[int], width: int, page_size: int, kv_format: Fp8Format
) -> tuple[PagedKeys, list[torch.Tensor]]:
    """Shuffled pages, and the decoded keys of each sequence; what lies behind a sequence's end is NaN."""
    num_pages = width // page_size
    keys = torch.full(
        (len(lengths) * num_pages, page_size, kv_format.index_key_bytes), 0xFF, dtype=torch.uint8, device=CUDA
    )
    table = torch.randperm(len(keys), device=CUDA, generator=generator(7)).view(len(lengths), -1)
    decoded = []
    for row, length in enumerate(lengths):
        stored = kv_format.encode_index_keys(randn(length, kv_format.index_dim, seed=8 + row) * 3 ** (row % 5))
        positions = torch.arange(length, device=CUDA)
        keys[table[row, positions // page_size], positions % page_size] = stored
        decoded.append(kv_format.index_keys(stored))
    return PagedKeys(keys, table, torch.tensor(lengths, device=CUDA)), decoded


@pytest.mark.parametrize(
    ("lengths", "width", "page_size", "heads", "kv_format"),
    [
        ([5000, 20000], 32768, 64, 64, PUBLISHED),
        ([100, 0, 1], 1024, 16, 32, PUBLISHED),
        ([3000], 4096, 64, 130, PUBLISHED),
        ([70000], 131072, 64, 64, PUBLISHED),
        ([4000, 0, 4096, 17, *range(1, 4000, 67)], 4096, 64, 64, PUBLISHED),
        ([33, 100, 1000, 63] * 150, 1024, 32, 32, PUBLISHED),
        ([1, 63, 64, 65, 200], 208, 16, 32, TINY),
        ([200], 200, 1, 16, TINY),
        ([300], 320, 32, 20, ODD),
    ],
)
@pytest.mark.parametrize("use_cuda_kernel", [True, False])
def test_decode_scores(
    lengths: list[int], width: int, page_size: int, heads: int, kv_format: Fp8Format, use_cuda_kernel: bool
) -> None:
    dim = kv_format.index_dim
    encoded = encode_index_queries(index_queries(len(lengths), heads, dim, torch.bfloat16))
    pages, decoded = fp8_pages(lengths, width, page_size, kv_format)
    scores = decode_scores(encoded, pages, StoredKeys.fp8(pages.keys, dim), use_cuda_kernel)
    assert scores.shape == (len(lengths), width)
    for row, length in enumerate(lengths):
        if length:
            one = encoded[row : row + 1]
            assert_scores(scores[row, :length], exact_scores(one, decoded[row], dim)[0])


@pytest.mark.parametrize("each", [2, 3, 4])
@pytest.mark.parametrize("heads", [32, 64])
def test_queries_of_one_request_get_what_each_gets_alone(each: int, heads: int) -> None:
    lengths = [5000, 0, 700, 64, 1, *range(3000, 9000, 501)]
    pages, _ = fp8_pages(lengths, 9024, 64, PUBLISHED)
    encoded = encode_index_queries(index_queries(each * len(lengths), heads, 128, torch.bfloat16))
    ends = torch.tensor([max(0, length - each + place) for length in lengths for place in range(1, each + 1)])
    table, keys = pages.page_table.repeat_interleave(each, 0), StoredKeys.fp8(pages.keys, 128)
    apart = PagedKeys(pages.keys, table, ends.to(CUDA))
    together = decode_scores(encoded, replace(apart, rows_each=each), keys)
    alone = decode_scores(encoded, apart, keys)
    for row, end in enumerate(ends.tolist()):
        assert torch.equal(together[row, :end], alone[row, :end])


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
def test_scores_do_not_depend_on_who_else_is_in_the_batch(stages: int) -> None:
    """Nor on how far ahead keys are fetched, nor on the room of the page table."""
    encoded = encode_index_queries(index_queries(5, 64, 128, torch.bfloat16))
    lengths = [30000, 5, 0, 12345, 64]
    pages, _ = fp8_pages(lengths, 32768, 64, PUBLISHED)
    given = PagesToScore(encoded.queries, encoded.head_weights, pages.keys, pages.page_table, pages.seq_lens)
    together = score_pages(given, stages)
    for row, length in enumerate(lengths):
        one = encoded[row : row + 1]
        few = PagedKeys(
            pages.keys, pages.page_table[row : row + 1, : max(1, -(-length // 64))], pages.seq_lens[row : row + 1]
        )
        alone = decode_scores(one, few, StoredKeys.fp8(pages.keys, 128))
        assert torch.equal(alone[0, :length], together[row, :length])


def test_a_replay_scores_sequences_that_have_grown() -> None:
    encoded = encode_index_queries(index_queries(3, 64, 128, torch.bfloat16))
    pages, decoded = fp8_pages([3000, 8000, 20], 8192, 64, PUBLISHED)
    final = pages.seq_lens.clone()
    pages.seq_lens.copy_(torch.tensor([5, 0, 20]))
    graph, scores = captured(lambda: decode_scores(encoded, pages, StoredKeys.fp8(pages.keys, 128)))
    pages.seq_lens.copy_(final)
    graph.replay()
    for row, length in enumerate(final.tolist()):
        assert_scores(scores[row, :length], exact_scores(encoded[row : row + 1], decoded[row], 128)[0])


@pytest.mark.parametrize(
    ("start", "tokens", "heads", "kv_format"),
    [
        (0, 1, 16, TINY),
        (100, 33, 20, TINY),
        (0, 1, 64, PUBLISHED),
        (0, 300, 64, PUBLISHED),
        (3000, 300, 32, PUBLISHED),
        (20000, 2048, 64, PUBLISHED),
    ],
)
@pytest.mark.parametrize("use_cuda_kernel", [True, False])
def test_prompt_scores(start: int, tokens: int, heads: int, kv_format: Fp8Format, use_cuda_kernel: bool) -> None:
    dim = kv_format.index_dim
    encoded = encode_index_queries(index_queries(tokens, heads, dim, torch.bfloat16))
    stored = kv_format.encode_index_keys(randn(start + tokens, dim, seed=9))
    scores = prompt_scores(encoded, StoredKeys.fp8(stored, dim), start, use_cuda_kernel)
    behind = torch.arange(start + tokens, device=CUDA) > torch.arange(start, start + tokens, device=CUDA)[:, None]
    exact = exact_scores(encoded, kv_format.index_keys(stored), dim)
    assert_scores(scores.masked_fill(behind, 0), exact.masked_fill(behind, 0))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_bfloat16_model_with_fp8_kv_is_as_exact_by_either_backend(family: FamilyName, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", family, seed=1, layers=5)
    exact = load_model(tmp_path / "tiny", torch.float32, CUDA)
    kv_format = Fp8Format(exact.spec.latent_dim, exact.spec.item_dim - exact.spec.latent_dim, exact.spec.index_dim)
    by_torch, by_triton = (
        load_model(tmp_path / "tiny", torch.bfloat16, CUDA, backend=backend(kv_format), kv_cache_dtype="fp8_e4m3")
        for backend in (AttentionBackend, triton_backend)
    )
    errors: list[list[torch.Tensor]] = [[], []]
    for seed in range(8):
        tokens = torch.randint(0, 256, (50 + 60 * seed,), device=CUDA, generator=generator(seed))
        truth, *found = (forced_logits(each, tokens, (1,) * 16, chunk=100) for each in (exact, by_triton, by_torch))
        for own, logits in zip(errors, found, strict=True):
            own.append((logits - truth).abs())
    assert torch.cat(errors[0]).mean() <= 1.3 * torch.cat(errors[1]).mean()
