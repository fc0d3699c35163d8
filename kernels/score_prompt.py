"""The lightning indexer's scores of a prompt's chunk on Hopper, of fp8 index keys, with csrc/score_prompt.cu."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from kernels.launch import DeviceKernel
from kernels.score_pages import DIM, HEADS, KEY_BYTES, processors
from kernels.specialization import PromptScoreSpecialization

STAGES = 3
_KEYS_PER_BLOCK = 256
_QUERIES_PER_ROUND = 4
_BLOCKS_PER_PROCESSOR = 4
"""One after the other: more would read keys more often, fewer would leave processors idle at the end."""
_FIELDS = "keys queries head_weights scores num_queries num_keys start queries_per_block"


class _Params(ctypes.Structure):
    """ScorePromptParams of csrc/score_prompt.cu."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS.split()]


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
        return heads in HEADS and dim == DIM and self.keys.shape[1] == KEY_BYTES and aligned


def score_prompt(
    given: PromptToScore, stages: int = STAGES, blocks_per_processor: int = _BLOCKS_PER_PROCESSOR
) -> torch.Tensor:
    """The sum over heads of weight * relu(query . key) * key's scale / sqrt(128): float32 [N, num_keys].

    given: `fits()`. What lies behind a query's own position is not written. stages: rounds of four queries in shared
    memory. blocks_per_processor: how many blocks a processor runs, one after the other. The first call for a device
    loads the kernel.
    """
    device = given.keys.device
    num_queries, heads, _ = given.queries.shape
    scores = torch.empty(num_queries, len(given.keys), dtype=torch.float32, device=device)
    if scores.numel():
        grid, per_block = _cut(num_queries, len(given.keys), blocks_per_processor * processors(device))
        with torch.cuda.device(device):
            _on_device(device, heads, stages).launch(launch_params(given, scores, per_block), (*grid, 1))
    return scores


def launch_params(given: PromptToScore, scores: torch.Tensor, queries_per_block: int) -> ctypes.Structure:
    """The kernel's parameters."""
    return _Params(
        given.keys.data_ptr(),
        given.queries.data_ptr(),
        given.head_weights.data_ptr(),
        scores.data_ptr(),
        *scores.shape,
        given.start,
        queries_per_block,
    )


def _cut(num_queries: int, num_keys: int, wanted: int) -> tuple[tuple[int, int], int]:
    """Blocks of keys and of queries, about as many as wanted in all, and queries of a block."""
    of_keys = -(-num_keys // _KEYS_PER_BLOCK)
    rounds = -(-num_queries // _QUERIES_PER_ROUND)
    rounds_per_block = -(-rounds // max(1, min(rounds, round(wanted / of_keys))))
    return (of_keys, -(-rounds // rounds_per_block)), rounds_per_block * _QUERIES_PER_ROUND


@functools.cache
def _on_device(device: torch.device, heads: int, stages: int) -> DeviceKernel:
    """The kernel of a device, loaded once."""
    return DeviceKernel(PromptScoreSpecialization(heads, stages), device)
