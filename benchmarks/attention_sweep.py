"""Ways to cut the fp8 kernels of attention and of the indexer, and what each takes: where their constants come from."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console

from benchmarks.attention import (
    FP8,
    INDEX_DIM,
    ITEM_DIM,
    LATENT_DIM,
    SCORED,
    SCORED_TOGETHER,
    TOPK,
    Sequences,
    index_inputs,
)
from benchmarks.graph_timing import Work, median_us
from kernels.operands import IndexQueries

_PROMPT_CONTEXTS = (8192, 32768)
_HEADS = 128
_SPLIT = ((1, 32), (4, 16), (16, 4), (32, 2))
"""Queries, and splits of each, that are combined."""
_NUM_ROWS = 1 << 20
_SCALING = 0.1


def run_sweep(only: str, console: Console) -> None:
    """Print what every way takes. only: `score`, `prompt`, `attend` or `combine`; all if empty."""
    for name, cases in _SWEEPS.items():
        if only in name:
            for title, turns, ways in cases():
                times = {way: median_us(work, turns) for way, work in ways.items()}
                cells = ", ".join(f"{way} {us:.1f}" for way, us in sorted(times.items(), key=lambda item: item[1]))
                console.print(f"{name}, {title}: {cells}", highlight=False, soft_wrap=True)


Sweeping = Iterator[tuple[str, int, dict[str, Work]]]
"""For each case what it is, the turns of its graph, and by name the ways to compute it."""


def _scores() -> Sweeping:
    from kernels.score_keys import PagesToScore, score_pages
    from kernels.triton.encode import encode_index_queries
    from kernels.triton.index_scores import StoredKeys, decode_scores

    for batch, context in SCORED:
        given, encoded = Sequences.random(batch, context), encode_index_queries(index_inputs(batch))
        keys = given.keys["fp8"]

        def by_hand(
            turn: int,
            stages: int,
            given: Sequences = given,
            encoded: IndexQueries = encoded,
            keys: torch.Tensor = keys,
        ) -> object:
            pages = PagesToScore(encoded.queries, encoded.head_weights, keys, given.tables[turn], given.seq_lens)
            return score_pages(pages, stages)

        ways: dict[str, Work] = {f"{stages} stages": partial(by_hand, stages=stages) for stages in (1, 2, 3, 4, 5, 6)}

        def by_triton(turn: int, waves: int, given: Sequences = given, encoded: IndexQueries = encoded) -> object:
            keys = StoredKeys.fp8(given.keys["fp8"], INDEX_DIM)
            return decode_scores(encoded, given.pages("fp8", turn), keys, use_cuda_kernel=False, waves=waves)

        ways |= {f"Triton, {waves} a processor": partial(by_triton, waves=waves) for waves in (2, 3)}
        yield f"{batch} x {context}", given.turns, ways


def _prompts() -> Sweeping:
    from kernels.score_keys import PromptToScore, score_prompt
    from kernels.triton.encode import encode_index_queries

    encoded = encode_index_queries(index_inputs(SCORED_TOGETHER))
    for context in _PROMPT_CONTEXTS:
        keys = FP8.encode_index_keys(torch.randn(context, INDEX_DIM))
        given = PromptToScore(encoded.queries, encoded.head_weights, keys, context - SCORED_TOGETHER)

        def work(_: int, stages: int, blocks: int, given: PromptToScore = given) -> object:
            return score_prompt(given, stages, blocks)

        ways: dict[str, Work] = {
            f"{stages} stages {blocks} blocks": partial(work, stages=stages, blocks=blocks)
            for stages in (2, 3, 4)
            for blocks in (1, 2, 4, 8)
        }
        yield f"{SCORED_TOGETHER} queries x {context}", 4, ways


def _attention() -> Sweeping:
    from kernels.triton.attend import Splits, attend_fp8_rows

    stored = FP8.encode_items(torch.randn(_NUM_ROWS, ITEM_DIM, dtype=torch.bfloat16))
    for batch in (1, 4, 16, 32, 64):
        query = torch.randn(batch, _HEADS, ITEM_DIM, dtype=torch.bfloat16)
        turns = max(2, 256 * 2**20 // (batch * TOPK * FP8.item_bytes))
        rows = torch.randint(0, _NUM_ROWS, (turns, batch, TOPK))

        def work(turn: int, splits: Splits, query: torch.Tensor = query, rows: torch.Tensor = rows) -> object:
            return attend_fp8_rows(query, stored, rows[turn], _SCALING, FP8, splits=splits)

        most = sorted({min(32, max(1, 132 // (2 * batch) * part // 4)) for part in (1, 2, 3, 4)})
        ways: dict[str, Work] = {
            f"{splits} splits {str(partial_type).removeprefix('torch.')}": partial(
                work, splits=Splits(splits, partial_type)
            )
            for splits in most
            for partial_type in (torch.float32, torch.bfloat16)
            if splits > 1 or partial_type == torch.float32
        }
        yield f"{batch} x {_HEADS} heads", turns, ways


def _combinations() -> Sweeping:
    """Of results that the device still caches, as they are behind the kernel that wrote them."""
    from kernels.triton.attend import combine

    for batch, splits in _SPLIT:
        log_sums = torch.randn(batch, _HEADS, splits)
        output = torch.empty(batch, _HEADS, LATENT_DIM, dtype=torch.bfloat16)
        ways: dict[str, Work] = {}
        for kind in (torch.float32, torch.bfloat16):
            given = torch.randn(batch, _HEADS, splits, LATENT_DIM, dtype=kind)
            for elements, warps in ((1024, 2), (2048, 2), (2048, 4), (4096, 4), (8192, 4), (8192, 8)):

                def work(
                    _: int,
                    given: torch.Tensor,
                    elements: int,
                    warps: int,
                    sums: torch.Tensor = log_sums,
                    to: torch.Tensor = output,
                ) -> object:
                    combine(given, sums, to, elements, warps)
                    return to

                name = f"{elements} by {warps} {str(kind).removeprefix('torch.')}"
                ways[name] = partial(work, given=given, elements=elements, warps=warps)
        yield f"{batch} x {_HEADS} heads, {splits} splits", 20, ways


_SWEEPS: dict[str, Callable[[], Sweeping]] = {
    "score": _scores,
    "prompt": _prompts,
    "attend": _attention,
    "combine": _combinations,
}
