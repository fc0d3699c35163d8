"""Copying items between the tiers by lists of slots, with csrc/copy_items.cu."""

from dataclasses import dataclass

import torch

from kernels.launch import kernel_on, processors
from kernels.specialization import VECTOR_BYTES, Specialization, params_of

CopyItemsParams = params_of("copy_items.cu", "CopyItemsParams")


@dataclass(frozen=True)
class CopySpecialization(Specialization):
    """csrc/copy_items.cu. aligned: item size and all bases are multiples of 16 bytes."""

    item_bytes: int
    aligned: bool
    block_size: int = 256

    entry = "copy_items"

    def constants(self) -> dict[str, int | str]:
        return {"ITEM_BYTES": self.item_bytes, "ALIGNED": int(self.aligned)}


def are_aligned(*pools: torch.Tensor) -> bool:
    """Whether every item of the pools, uint8 [num_layers, slots, item_bytes], begins at a multiple of 16 bytes."""
    return not any((pool.data_ptr() | pool.stride(0) | pool.shape[-1]) % VECTOR_BYTES for pool in pools)


def copy_items(
    source: torch.Tensor,
    target: torch.Tensor,
    from_slots: torch.Tensor,
    to_slots: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    copied_bytes: int = 0,
    most_blocks: int | None = None,
) -> None:
    """Copy in every layer the items at `from_slots` to `to_slots`; -1 is skipped.

    source, target: uint8 [num_layers, slots, item_bytes], contiguous within a layer. from_slots, to_slots: int64,
    contiguous, on the device, [width] or [rows, width]. counts: int32 [rows], how many of each row are meant, all if
    absent. copied_bytes: address of a counter (uint64) to add to, or 0. most_blocks: of a layer; None: what can run.
    """
    if not from_slots.numel():
        return
    num_layers, device = len(source), from_slots.device
    rows, width = from_slots.view(-1, from_slots.shape[-1]).shape
    kernel = kernel_on(device, CopySpecialization(source.shape[-1], are_aligned(source, target)))
    warps = kernel.specialization.block_size // 32
    blocks = min(-(-width // warps), max(1, (most_blocks or 2 * processors(device) // num_layers) // rows))
    params = CopyItemsParams(
        source.data_ptr(),
        target.data_ptr(),
        source.stride(0),
        target.stride(0),
        from_slots.data_ptr(),
        to_slots.data_ptr(),
        0 if counts is None else counts.data_ptr(),
        copied_bytes,
        width,
        rows,
    )
    kernel.launch(params, (blocks, min(rows, most_blocks or rows), num_layers))
