"""Top-k selection against a plain transcription of its definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionBackend
from kernels.operands import IndexQueries, PagedKeys
from kvcache.format import DenseFormat

HEADS, DIM = 16, 8
BACKEND = AttentionBackend(DenseFormat(torch.float32, item_dim=DIM, index_dim=DIM))


def index_queries(generator: torch.Generator, tokens: int) -> IndexQueries:
    return IndexQueries.of(
        queries=torch.randn(tokens, HEADS, DIM, generator=generator),
        head_weights=torch.randn(tokens, HEADS, generator=generator),
    )


def stored(keys: torch.Tensor) -> torch.Tensor:
    """Keys [..., DIM] as a pool holds them."""
    return BACKEND.format.encode_index_keys(keys)


def best_positions(query: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, topk: int) -> set[int]:
    scores = [float((head_weights * torch.relu(query @ key) * DIM**-0.5).sum()) for key in keys]
    ranked = sorted(range(len(scores)), key=lambda position: -scores[position])
    return set(ranked[:topk])


@settings(max_examples=40)
@given(
    prompt_len=st.integers(1, 40),
    topk=st.integers(1, 50),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 99),
)
def test_a_prompt_token_selects_up_to_its_own(prompt_len: int, topk: int, cuts: tuple[float, float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = index_queries(generator, prompt_len)
    keys = torch.randn(prompt_len, DIM, generator=generator)
    start = int(min(cuts) * (prompt_len - 1))
    stop = max(start + 1, int(max(cuts) * prompt_len))
    selected = BACKEND.select_for_prompt(whole[start:stop], stored(keys[:stop]), start, prompt_len, topk)

    assert selected.shape == (stop - start, min(topk, prompt_len))
    for row, position in zip(selected.tolist(), range(start, stop), strict=True):
        visible = keys[: position + 1]
        best = best_positions(whole.queries[position], whole.head_weights[position], visible, topk)
        assert row[0] >= 0
        assert len([p for p in row if p >= 0]) == len(best)
        assert {p for p in row if p >= 0} == best


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    topk=st.integers(1, 50),
    page_size=st.sampled_from([1, 4, 16]),
    host_knows=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_decoded_token_selects_the_best_positions_of_its_own_sequence(
    lengths: list[int], topk: int, page_size: int, host_knows: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = index_queries(generator, len(lengths))
    pages_per_request = -(-max(lengths) // page_size)
    num_pages = pages_per_request * len(lengths)
    page_table = torch.randperm(num_pages, generator=generator).view(len(lengths), -1)
    pool = torch.randn(num_pages, page_size, DIM, generator=generator)

    pages = PagedKeys(stored(pool), page_table, torch.tensor(lengths), lengths if host_knows else None)
    selected = BACKEND.select_for_decode(index, pages, topk)

    assert selected.shape == (len(lengths), min(topk, max(lengths) if host_knows else pages_per_request * page_size))
    for row, length in enumerate(lengths):
        keys = pool[page_table[row]].flatten(0, 1)[:length]
        best = best_positions(index.queries[row], index.head_weights[row], keys, topk)
        assert set(selected[row, : len(best)].tolist()) == best
        assert (selected[row, len(best) :] == -1).all()


def test_padding_selects_nothing() -> None:
    index = index_queries(torch.Generator().manual_seed(0), 2)
    pages = PagedKeys(stored(torch.randn(6, 4, DIM)), torch.tensor([[0, 1], [3, 0]]), torch.tensor([7, 0]), None)
    selected = BACKEND.select_for_decode(index, pages, 5)
    assert (selected[0] >= 0).all()
    assert (selected[1] == -1).all()


def test_a_batch_of_padding_alone_selects_one_position_that_does_not_exist() -> None:
    """As the step of a rank that has no requests while others do: swap-in kernels take one position and more."""
    index = index_queries(torch.Generator().manual_seed(0), 2)
    for lengths in (None, (0, 0)):
        pages = PagedKeys(
            stored(torch.randn(1, 4, DIM)),
            torch.zeros(2, 1, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
            lengths,
        )
        selected = BACKEND.select_for_decode(index, pages, 5)
        assert selected.shape[0] == 2
        assert selected.shape[1] >= 1
        assert (selected == -1).all()


def test_equal_scores_are_resolved_as_in_a_row_of_the_whole_prompt() -> None:
    prompt_len, topk = 200, 64
    tied = IndexQueries.of(torch.zeros(20, HEADS, DIM), torch.ones(20, HEADS))
    row = torch.full((1, prompt_len), float("-inf"))
    row[:, :120] = 0
    expected = row.topk(topk).indices[0].tolist()
    assert (
        BACKEND.select_for_prompt(tied, stored(torch.zeros(120, DIM)), 100, prompt_len, topk)[-1].tolist() == expected
    )
