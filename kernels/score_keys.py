"""The lightning indexer's scores of fp8 index keys on Hopper.

csrc/score_pages.cu scores the pages of a decode step, csrc/score_prompt.cu the keys before a prompt's chunk.
"""

import ctypes
from abc import abstractmethod
from dataclasses import dataclass

import torch

from kernels.kv_format import PUBLISHED
from kernels.launch import kernel_on, processors
from kernels.specialization import WARP, Specialization, params_of

HEADS = (32, 64)
TILE = 64
"""Keys of a warpgroup."""
PIECE = 16
"""Of these, keys of a warp."""
QUERIES_PER_ROUND = 4
MAX_SCORED = 1024
"""Sequences of a launch that scores pages: each takes 8 bytes of the shared memory of every block."""
PAGE_STAGES = 2
"""More of them, up to the 6 that shared memory has room for at 512 threads, took up to a tenth longer."""
PROMPT_STAGES = 3
_ALIGNMENT = 1024
"""Of queries in shared memory."""
_KEYS_PER_BLOCK = 256
_BLOCKS_PER_PROCESSOR = 4
"""One after the other: more would read keys more often, fewer would leave processors idle at the end."""

ScorePagesParams = params_of("score_pages.cu", "ScorePagesParams")
ScorePromptParams = params_of("score_prompt.cu", "ScorePromptParams")


@dataclass(frozen=True)
class _ScoreSpecialization(Specialization):
    """heads: 32 or 64, of the indexer."""

    heads: int
    stages: int
    block_size: int = 512

    architecture_features = "a"

    def constants(self) -> dict[str, int | str]:
        return {
            "DIM": PUBLISHED.index_dim,
            "KEY_BYTES": PUBLISHED.index_key_bytes,
            "TILE": TILE,
            "PIECE": PIECE,
            "HEADS": self.heads,
            "STAGES": self.stages,
            "FIXED_BYTES": self.fixed_bytes,
        }

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Shared memory whatever the batch."""

    @property
    def shared_bytes(self) -> int:
        return self.fixed_bytes


@dataclass(frozen=True)
class PageScoreSpecialization(_ScoreSpecialization):
    """csrc/score_pages.cu. stages: pieces of 16 keys that each warp fetches ahead. queries: of each sequence."""

    queries: int = 1

    entry = "score_pages"

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the list of sequences: queries and their weights, where they may begin, pieces with a
        barrier, totals."""
        warps, piece = self.block_size // WARP, PIECE * PUBLISHED.index_key_bytes
        queries = self.queries * self.heads * (PUBLISHED.index_dim + 4)
        return _ALIGNMENT + queries + warps * self.stages * (piece + 8) + 8 * warps

    @property
    def shared_bytes(self) -> int:
        """Of the largest batch."""
        return self.shared_bytes_for(MAX_SCORED)

    def shared_bytes_for(self, batch: int) -> int:
        """Shared memory of a launch for so many sequences."""
        return self.fixed_bytes + 4 * (2 * batch + 1)

    def constants(self) -> dict[str, int | str]:
        return {**super().constants(), "QUERIES": self.queries}


class PromptScoreSpecialization(_ScoreSpecialization):
    """csrc/score_prompt.cu. stages: rounds of four queries in shared memory, at least 2."""

    entry = "score_prompt"

    @property
    def fixed_bytes(self) -> int:
        """Queries and weights of all rounds, and where they may begin."""
        return _ALIGNMENT + self.stages * QUERIES_PER_ROUND * self.heads * (PUBLISHED.index_dim + 4)

    def constants(self) -> dict[str, int | str]:
        return {**super().constants(), "QUERIES": QUERIES_PER_ROUND}


@dataclass(frozen=True)
class PagesToScore:
    """What the kernel reads, all on one CUDA device.

    queries: float8_e4m3 [batch * queries_each, heads, 128], contiguous. head_weights: float32 [batch * queries_each,
    heads], contiguous. keys: uint8 [pages, page_size, 132], contiguous: 128 float8_e4m3, and a float32 scale.
    page_table: int64 [batch * queries_each, max_pages]; the rows of a sequence are equal. lengths: int64 [batch *
    queries_each], contiguous. The last two are read while the kernel before may still run, so that kernel must not be
    the one that writes them. queries_each: of each sequence, one after the other.
    """

    queries: torch.Tensor
    head_weights: torch.Tensor
    keys: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    queries_each: int = 1

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.queries) // self.queries_each

    def fits(self) -> bool:
        """Whether the kernel can compute this."""
        _, heads, dim = self.queries.shape
        return (
            _are_published(heads, dim, self.keys)
            and self.batch <= MAX_SCORED
            and 1 <= self.queries_each <= QUERIES_PER_ROUND
            and self.keys.shape[1] % PIECE == 0
            and self.keys.data_ptr() % 16 == 0
            and self.page_table.stride(1) == 1
            and self.lengths.is_contiguous()
            and self.page_table.dtype == self.lengths.dtype == torch.int64
            and self.head_weights.dtype == torch.float32
        )


@dataclass(frozen=True)
class PromptToScore:
    """What the kernel reads, all on one CUDA device.

    queries: float8_e4m3 [N, heads, 128] at consecutive positions from `start` on, contiguous. head_weights: float32
    [N, heads], contiguous. keys: uint8 [num_keys, 132] of positions from 0, contiguous: 128 float8_e4m3, and a float32
    scale.
    """

    queries: torch.Tensor
    head_weights: torch.Tensor
    keys: torch.Tensor
    start: int

    def fits(self) -> bool:
        """Whether the kernel can compute this."""
        _, heads, dim = self.queries.shape
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (self.queries, self.head_weights))
        return _are_published(heads, dim, self.keys) and aligned


def score_pages(given: PagesToScore, stages: int = PAGE_STAGES) -> torch.Tensor:
    """The sum over heads of weight * relu(query . key) * key's scale / sqrt(128).

    Returns float32 [batch * queries_each, max_pages * page_size]; what lies past the longest length of a sequence is
    not written, and what lies past a shorter one is meaningless. given: `fits()`. stages: pieces of 16 keys that a warp
    fetches ahead.

    The launch depends on shapes alone and waits for nothing. Lengths are read on the device, which shares the work out
    evenly whatever they are. The first call for a device loads the kernel: make one before a graph is captured.
    """
    device = given.keys.device
    rows, heads, _ = given.queries.shape
    width = given.page_table.shape[1] * given.keys.shape[1]
    scores = torch.empty(rows, width, dtype=torch.float32, device=device)
    if scores.numel():
        with torch.cuda.device(device):
            kernel = PageScoreSpecialization(heads, stages, queries=given.queries_each)
            blocks = min(processors(device), given.batch * -(-width // TILE))
            shared_bytes = kernel.shared_bytes_for(given.batch)
            kernel_on(device, kernel).launch(page_params(given, scores), (blocks, 1, 1), shared_bytes=shared_bytes)
    return scores


def page_params(given: PagesToScore, scores: torch.Tensor) -> ctypes.Structure:
    """The kernel's parameters."""
    return ScorePagesParams(
        keys=given.keys.data_ptr(),
        queries=given.queries.data_ptr(),
        head_weights=given.head_weights.data_ptr(),
        page_table=given.page_table.data_ptr(),
        lengths=given.lengths.data_ptr(),
        scores=scores.data_ptr(),
        page_stride=given.keys.stride(0),
        page_size=given.keys.shape[1],
        table_stride=given.page_table.stride(0),
        width=scores.shape[1],
        batch=given.batch,
    )


def score_prompt(
    given: PromptToScore, stages: int = PROMPT_STAGES, blocks_per_processor: int = _BLOCKS_PER_PROCESSOR
) -> torch.Tensor:
    """The sum over heads of weight * relu(query . key) * key's scale / sqrt(128): float32 [N, num_keys].

    given: `fits()`. What lies past a query's own position is not written. stages: rounds of four queries in shared
    memory. blocks_per_processor: how many blocks a processor runs, one after the other. The first call for a device
    loads the kernel.
    """
    device = given.keys.device
    num_queries, heads, _ = given.queries.shape
    scores = torch.empty(num_queries, len(given.keys), dtype=torch.float32, device=device)
    if scores.numel():
        grid, per_block = _cut(num_queries, len(given.keys), blocks_per_processor * processors(device))
        with torch.cuda.device(device):
            kernel = kernel_on(device, PromptScoreSpecialization(heads, stages))
            kernel.launch(prompt_params(given, scores, per_block), (*grid, 1))
    return scores


def prompt_params(given: PromptToScore, scores: torch.Tensor, queries_per_block: int) -> ctypes.Structure:
    """The kernel's parameters."""
    return ScorePromptParams(
        keys=given.keys.data_ptr(),
        queries=given.queries.data_ptr(),
        head_weights=given.head_weights.data_ptr(),
        scores=scores.data_ptr(),
        num_queries=scores.shape[0],
        num_keys=scores.shape[1],
        start=given.start,
        queries_per_block=queries_per_block,
    )


def _cut(num_queries: int, num_keys: int, wanted: int) -> tuple[tuple[int, int], int]:
    """Blocks of keys and of queries, about as many as wanted in all, and queries of a block."""
    of_keys = -(-num_keys // _KEYS_PER_BLOCK)
    rounds = -(-num_queries // QUERIES_PER_ROUND)
    rounds_per_block = -(-rounds // max(1, min(rounds, round(wanted / of_keys))))
    return (of_keys, -(-rounds // rounds_per_block)), rounds_per_block * QUERIES_PER_ROUND


def _are_published(heads: int, dim: int, keys: torch.Tensor) -> bool:
    return heads in HEADS and dim == PUBLISHED.index_dim and keys.shape[-1] == PUBLISHED.index_key_bytes
