"""Copying items between the tiers by lists of slots, with csrc/copy_items.cu."""

import ctypes
from dataclasses import dataclass

import torch

from hisparse.cuda.launch import DeviceKernel
from hisparse.cuda.specialization import VECTOR_BYTES, CopySpecialization


class _Params(ctypes.Structure):
    """CopyItemsParams of csrc/copy_items.cu."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "from_items",
            "to_items",
            "from_layer_bytes",
            "to_layer_bytes",
            "from_slots",
            "to_slots",
            "counts",
            "bytes",
            "width",
        )
    ]


@dataclass(frozen=True)
class Items:
    """Items of one or several layers. base: address of the first. layer_bytes: from one layer to the next."""

    base: int
    layer_bytes: int = 0

    @classmethod
    def of(cls, layers: torch.Tensor) -> "Items":
        """All layers of a pool, contiguous [num_layers, num_slots, ...]."""
        return cls(layers.data_ptr(), layers.stride(0) * layers.itemsize)

    def aligned(self, item_bytes: int) -> bool:
        """Whether every item begins and ends at a multiple of 16 bytes."""
        return not (self.base | self.layer_bytes | item_bytes) % VECTOR_BYTES


class ItemCopier:
    """Copies items of one size.

    The kernel for the alignment that is expected is loaded at once, since loading it while a graph is captured would
    break the capture; the other one when it is needed.
    """

    def __init__(self, item_bytes: int, device: torch.device, aligned: bool) -> None:
        self._item_bytes = item_bytes
        self._device = device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels: dict[bool, DeviceKernel] = {}
        self._kernel(aligned)

    def copy(
        self,
        source: Items,
        target: Items,
        from_slots: torch.Tensor,
        to_slots: torch.Tensor,
        *,
        num_layers: int = 1,
        counts: torch.Tensor | None = None,
        copied_bytes: int = 0,
    ) -> None:
        """Copy in every layer the items at `from_slots` to `to_slots`; -1 is skipped.

        from_slots, to_slots: int64, contiguous, on the device, [width] or [rows, width]. counts: int32 [rows], how many
        of each row are meant, all if absent. copied_bytes: address of a counter (uint64) to add to, or 0.
        """
        if not from_slots.numel():
            return
        rows, width = from_slots.view(-1, from_slots.shape[-1]).shape
        kernel = self._kernel(source.aligned(self._item_bytes) and target.aligned(self._item_bytes))
        warps = kernel.specialization.block_size // 32
        blocks = min(-(-width // warps), max(1, 2 * self._processors // (rows * num_layers)))
        params = _Params(
            source.base,
            target.base,
            source.layer_bytes,
            target.layer_bytes,
            from_slots.data_ptr(),
            to_slots.data_ptr(),
            0 if counts is None else counts.data_ptr(),
            copied_bytes,
            width,
        )
        kernel.launch(params, (blocks, rows, num_layers))

    def _kernel(self, aligned: bool) -> DeviceKernel:
        if aligned not in self._kernels:
            self._kernels[aligned] = DeviceKernel(CopySpecialization(self._item_bytes, aligned), self._device)
        return self._kernels[aligned]
