"""Other projects' kernels on the same KV, for the same table: FlashMLA's and DeepGEMM's, where they are installed.

An extra that cannot be imported, or that refuses to run, is left out, and the reason is printed.
"""

import importlib
from collections.abc import Callable

import torch
from rich.console import Console

from kernels.operands import IndexQueries

_PAGE_SIZE = 64
_LATENT_DIM = 512


def flash_mla(
    queries: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor, scaling: float
) -> Callable[[int], object] | None:
    """FlashMLA's sparse decode: turn i attends queries [N, heads, 576] to rows[i], [N, k], of fp8 items [rows, 656]."""

    def make() -> Callable[[int], object]:
        library = importlib.import_module("flash_mla")
        num_queries, heads, _ = queries.shape
        k = rows.shape[2]
        lengths = torch.full((num_queries,), k, dtype=torch.int32)
        metadata, splits = library.get_mla_metadata(
            lengths, heads, 1, num_heads_q=heads, is_fp8_kvcache=True, topk=k, use_legacy=True
        )
        items, query = stored.view(-1, _PAGE_SIZE, 1, stored.shape[1]), queries.unsqueeze(1)
        table = torch.zeros(num_queries, k // _PAGE_SIZE, dtype=torch.int32)
        indices = rows.int().unsqueeze(2)

        def run(turn: int) -> object:
            return library.flash_mla_with_kvcache(
                query,
                items,
                table,
                lengths,
                _LATENT_DIM,
                metadata,
                splits,
                softmax_scale=scaling,
                is_fp8_kvcache=True,
                indices=indices[turn],
                use_legacy=True,
            )

        return run

    return _tried("FlashMLA", make)


def flash_mla_prompt(
    queries: torch.Tensor, items: torch.Tensor, positions: torch.Tensor, scaling: float
) -> Callable[[int], object] | None:
    """FlashMLA's sparse prefill: queries [N, heads, 576] attend to positions [N, k] of bfloat16 items [M, 576]."""

    def make() -> Callable[[int], object]:
        library = importlib.import_module("flash_mla")
        item, indices = items.unsqueeze(1), positions.int().unsqueeze(1)
        return lambda _: library.flash_mla_sparse_fwd(
            queries, item, indices, scaling, use_legacy=True, return_log2_lse=False
        )

    return _tried("FlashMLA", make)


def deep_gemm_scores(
    encoded: IndexQueries, stored: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> Callable[[int], object] | None:
    """DeepGEMM's index logits: turn i scores pages tables[i], [N, pages], of `stored`, uint8 [pages, 64, 132].

    It takes the same bytes for other keys, since its pages hold all vectors and then all scales; that takes as long.
    """

    def make() -> Callable[[int], object]:
        library = importlib.import_module("deep_gemm")
        query, keys = encoded.queries.unsqueeze(1), stored.unsqueeze(2)
        counts, pages = lengths.int().unsqueeze(1), tables.int()
        processors = torch.cuda.get_device_properties(stored.device).multi_processor_count
        schedule = library.get_paged_mqa_logits_metadata(counts, _PAGE_SIZE, processors)
        longest = pages.shape[2] * _PAGE_SIZE

        def run(turn: int) -> object:
            return library.fp8_paged_mqa_logits(
                query, keys, encoded.head_weights, counts, pages[turn], schedule, longest, False
            )

        return run

    return _tried("DeepGEMM", make)


def _tried(name: str, make: Callable[[], Callable[[int], object]]) -> Callable[[int], object] | None:
    try:
        run = make()
        run(0)
        torch.cuda.synchronize()
    except ImportError:
        return None
    except Exception as error:  # whatever another version of it raises
        Console().print(f"{name} is left out: {type(error).__name__}: {error}", highlight=False, markup=False)
        return None
    return run
