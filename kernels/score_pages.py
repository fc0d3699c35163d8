"""The lightning indexer's scores of a decode step on Hopper, of fp8 index keys, with csrc/score_pages.cu."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from kernels.launch import DeviceKernel
from kernels.specialization import MAX_SCORED, ScoreSpecialization

DIM = 128
KEY_BYTES = DIM + 4
HEADS = (32, 64)
STAGES = 2
"""More of them, up to the 6 that shared memory has room for at 512 threads, took up to a tenth longer."""
_TILE = 64
_PIECE = 16
_FIELDS = "keys queries head_weights page_table lengths scores page_stride page_size table_stride width batch"


class _Params(ctypes.Structure):
    """ScorePagesParams of csrc/score_pages.cu."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS.split()]


@dataclass(frozen=True)
class PagesToScore:
    """What the kernel reads, all on one CUDA device.

    queries: float8_e4m3 [batch, heads, 128], contiguous. head_weights: float32 [batch, heads], contiguous. keys: uint8
    [pages, page_size, 132], contiguous: 128 float8_e4m3, and a float32 scale. page_table: int64 [batch, max_pages].
    lengths: int64 [batch], contiguous. The last two are read while the kernel before may still run, so that kernel must
    not be the one that writes them.
    """

    queries: torch.Tensor
    head_weights: torch.Tensor
    keys: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor

    def fits(self) -> bool:
        """Whether the kernel can compute this."""
        batch, heads, dim = self.queries.shape
        return (
            heads in HEADS
            and dim == DIM
            and self.keys.shape[2] == KEY_BYTES
            and batch <= MAX_SCORED
            and self.keys.shape[1] % _PIECE == 0
            and self.keys.data_ptr() % 16 == 0
            and self.page_table.stride(1) == 1
            and self.lengths.is_contiguous()
            and self.page_table.dtype == self.lengths.dtype == torch.int64
            and self.head_weights.dtype == torch.float32
        )


def has_kernel(device: torch.device) -> bool:
    """Whether the device has what the kernel uses: warpgroup products and a copy engine, as Hopper has them."""
    return torch.cuda.get_device_capability(device)[0] == 9


def score_pages(given: PagesToScore, stages: int = STAGES) -> torch.Tensor:
    """The sum over heads of weight * relu(query . key) * key's scale / sqrt(128).

    Returns float32 [batch, max_pages * page_size]; what lies behind a sequence's length is not written. given:
    `fits()`. stages: pieces of 16 keys that a warp fetches ahead.

    The launch depends on shapes alone and waits for nothing. Lengths are read on the device, which shares the work out
    evenly whatever they are. The first call for a device loads the kernel: make one before a graph is captured.
    """
    device = given.keys.device
    batch, heads, _ = given.queries.shape
    width = given.page_table.shape[1] * given.keys.shape[1]
    scores = torch.empty(batch, width, dtype=torch.float32, device=device)
    if scores.numel():
        with torch.cuda.device(device):
            kernel = _on_device(device, heads, stages)
            tiles = batch * -(-width // _TILE)
            blocks = min(processors(device), tiles)
            shared_bytes = kernel.specialization.shared_bytes_for(batch)  # type: ignore[union-attr]
            kernel.launch(launch_params(given, scores), (blocks, 1, 1), shared_bytes=shared_bytes)
    return scores


def launch_params(given: PagesToScore, scores: torch.Tensor) -> ctypes.Structure:
    """The kernel's parameters."""
    return _Params(
        given.keys.data_ptr(),
        given.queries.data_ptr(),
        given.head_weights.data_ptr(),
        given.page_table.data_ptr(),
        given.lengths.data_ptr(),
        scores.data_ptr(),
        given.keys.stride(0),
        given.keys.shape[1],
        given.page_table.stride(0),
        scores.shape[1],
        len(scores),
    )


@functools.cache
def _on_device(device: torch.device, heads: int, stages: int) -> DeviceKernel:
    """The kernel of a device, loaded once."""
    return DeviceKernel(ScoreSpecialization(heads, stages), device)


@functools.cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
