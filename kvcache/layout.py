"""What the KV of one token consists of, and which buffers of a pool hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from transfer.memory import BufferInfo


@dataclass(frozen=True)
class KVLayout:
    """Sizes of what one token leaves in the KV tiers.

    Every layer stores one *item* of `item_bytes` per token. Layers are grouped by the index layer whose selection they
    use (`index_layer_of`, non-decreasing, starting at 0, no gaps); every index layer stores one index key of
    `index_key_bytes` per token. Layers of one group always select the same positions, so they always hold the same
    positions in the hot buffer: residency is kept per index layer.
    """

    index_layer_of: tuple[int, ...]
    item_bytes: int
    index_key_bytes: int

    @property
    def num_layers(self) -> int:
        return len(self.index_layer_of)

    @property
    def num_index_layers(self) -> int:
        return self.index_layer_of[-1] + 1

    @cached_property
    def layer_of_buffer(self) -> tuple[int, ...]:
        """The layer after which each buffer of a pool is complete.

        Nodes name the buffers in this order: one per layer, then one per index layer.
        """
        firsts = (self.index_layer_of.index(group) for group in range(self.num_index_layers))
        return *range(self.num_layers), *firsts

    def layers_of(self, index_layer: int) -> list[int]:
        """The layers that use an index layer's selection, in order."""
        first = self.index_layer_of.index(index_layer)
        return list(range(first, first + self.index_layer_of.count(index_layer)))

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, index keys included."""
        return self.num_layers * self.item_bytes + self.num_index_layers * self.index_key_bytes


def buffers_by_layer(layer_of_buffer: Sequence[int]) -> list[int]:
    """Numbers of buffers in the order in which a forward pass completes them. layer_of_buffer: as in KVLayout."""
    return sorted(range(len(layer_of_buffer)), key=lambda buffer: layer_of_buffer[buffer])


def buffer_info(buffers: Sequence[torch.Tensor]) -> BufferInfo:
    """Address, length and item length in bytes of contiguous tensors [positions, dim]."""
    return BufferInfo(
        ptrs=tuple(buffer.data_ptr() for buffer in buffers),
        lengths=tuple(buffer.nbytes for buffer in buffers),
        item_lengths=tuple(buffer.shape[1] * buffer.itemsize for buffer in buffers),
    )
