"""Attention to fp8 items of 512 + 64 elements on Hopper, by 64 heads at a time, with csrc/attend_items.cu."""

import ctypes
import functools
import struct
from dataclasses import dataclass

import torch

from kernels.launch import DeviceKernel
from kernels.specialization import AttendSpecialization

LATENT_DIM, ROPE_DIM, ITEM_BYTES = 512, 64, 656
TILE_HEADS = 64
"""Of a tile, which a block computes."""
TILE_ITEMS = 64
"""Of a tile; splits are whole tiles."""
_FIELDS = "queries items rows partial log_sums partial_bytes heads k rows_per_split scale"


class _Params(ctypes.Structure):
    """AttendItemsParams of csrc/attend_items.cu."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS.split()]


@dataclass(frozen=True)
class ItemsToAttend:
    """What the kernel reads and writes, all on one CUDA device, contiguous.

    queries: bfloat16 [N, heads, 576]. items: uint8 [M, 656], see `kvcache.fp8_format`, M below 2**31. rows: int64
    [N, k], -1 for none. partial: bfloat16 or float32 [N, heads, splits, 512], of each split of `rows_per_split` rows,
    a multiple of 64, the mean latent by the split's own weights. log_sums: float32 [N, heads, splits], the base-2
    logarithms of the sums of those weights. scale: of scores, in units of log2(e).
    """

    queries: torch.Tensor
    items: torch.Tensor
    rows: torch.Tensor
    partial: torch.Tensor
    log_sums: torch.Tensor
    rows_per_split: int
    scale: float

    @property
    def tiles_of_heads(self) -> int:
        return -(-self.queries.shape[1] // TILE_HEADS)

    @property
    def grid(self) -> tuple[int, int, int]:
        return len(self.queries) * self.tiles_of_heads, self.partial.shape[2], 1


def attend_items(given: ItemsToAttend) -> None:
    """Launch the kernel. The first call for a device loads it."""
    with torch.cuda.device(given.queries.device):
        kernel = _on_device(given.queries.device)
        kernel.launch(launch_params(given), given.grid)


def launch_params(given: ItemsToAttend) -> ctypes.Structure:
    """The kernel's parameters."""
    return _Params(
        given.queries.data_ptr(),
        given.items.data_ptr(),
        given.rows.data_ptr(),
        given.partial.data_ptr(),
        given.log_sums.data_ptr(),
        given.partial.element_size(),
        given.queries.shape[1],
        given.rows.shape[1],
        given.rows_per_split,
        struct.unpack("I", struct.pack("f", given.scale))[0],
    )


@functools.cache
def _on_device(device: torch.device) -> DeviceKernel:
    """The kernel of a device, loaded once."""
    return DeviceKernel(AttendSpecialization(), device)
