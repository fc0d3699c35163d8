"""Attention to items of 512 + 64 elements, in fp8 or bfloat16, on Hopper, by 64 heads at a time, with
csrc/attend_items.cu: split-K with an online softmax."""

import ctypes
import struct
from dataclasses import dataclass

import torch

from kernels.kv_format import PUBLISHED, SCALED_TOGETHER
from kernels.launch import kernel_on
from kernels.specialization import Specialization, params_of

TILE_HEADS = 64
"""Of a tile, which a block computes."""
TILE_ITEMS = 64
"""Of a tile; splits are whole tiles."""
AttendItemsParams = params_of("attend_part.cuh", "AttendItemsParams")


@dataclass(frozen=True)
class AttendSpecialization(Specialization):
    """csrc/attend_items.cu. item_bytes: of fp8 items, or of bfloat16 ones."""

    item_bytes: int
    block_size: int = 384

    entry = "attend_items"
    architecture_features = "a"

    @property
    def shared_bytes(self) -> int:
        """Queries, two tiles of items, three numbers for each of their rows or heads, gates, and alignment."""
        tile, alignment = TILE_ITEMS * 2 * (PUBLISHED.latent_dim + PUBLISHED.rope_dim), 1024
        return 3 * tile + 3 * 2 * TILE_ITEMS * 4 + 9 * 8 + alignment

    def constants(self) -> dict[str, int | str]:
        return {
            "LATENT": PUBLISHED.latent_dim,
            "ROPE": PUBLISHED.rope_dim,
            "ITEM_BYTES": self.item_bytes,
            "SCALED_TOGETHER": SCALED_TOGETHER,
            "TILE_HEADS": TILE_HEADS,
            "TILE_ITEMS": TILE_ITEMS,
            "FIXED_BYTES": self.shared_bytes,
        }


@dataclass(frozen=True)
class ItemsToAttend:
    """What the kernel reads and writes, all on one CUDA device, contiguous.

    queries: bfloat16 [N, heads, 576]. items: uint8 [M, 656], see `kernels.kv_format`, or bfloat16 [M, 576], M below
    2**31. rows: int64 [N, k], -1 for none. partial: bfloat16 or float32 [N, heads, splits, 512], of each split of
    `rows_per_split` rows, a multiple of 64, the mean latent by the split's own weights. log_sums: float32 [N, heads,
    splits], the base-2 logarithms of the sums of those weights. scale: of scores, in units of log2(e).
    """

    queries: torch.Tensor
    items: torch.Tensor
    rows: torch.Tensor
    partial: torch.Tensor
    log_sums: torch.Tensor
    rows_per_split: int
    scale: float

    @property
    def grid(self) -> tuple[int, int, int]:
        return len(self.queries) * -(-self.queries.shape[1] // TILE_HEADS), self.partial.shape[2], 1

    @property
    def kernel(self) -> AttendSpecialization:
        return AttendSpecialization(self.items.shape[1] * self.items.element_size())


def attend_items(given: ItemsToAttend) -> None:
    """Launch the kernel. The first call for a device loads it."""
    with torch.cuda.device(given.queries.device):
        kernel_on(given.queries.device, given.kernel).launch(launch_params(given), given.grid)


def launch_params(given: ItemsToAttend) -> ctypes.Structure:
    """The kernel's parameters."""
    return AttendItemsParams(
        queries=given.queries.data_ptr(),
        items=given.items.data_ptr(),
        rows=given.rows.data_ptr(),
        partial=given.partial.data_ptr(),
        log_sums=given.log_sums.data_ptr(),
        partial_bytes=given.partial.element_size(),
        heads=given.queries.shape[1],
        k=given.rows.shape[1],
        rows_per_split=given.rows_per_split,
        scale=struct.unpack("I", struct.pack("f", given.scale))[0],
    )
