"""The shape of KV that both tiers store."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVLayout:
    """Sizes of what one token leaves in the KV tiers.

    Every layer stores one *item* of `item_dim` elements per token. Layers are grouped by the index layer whose
    selection they use (`index_layer_of`, non-decreasing, starting at 0, no gaps); every index layer stores one index
    key of `index_dim` elements per token. Layers of one group always select the same positions, so they always hold
    the same positions in the hot buffer: residency is kept per index layer.
    """

    num_layers: int
    index_layer_of: tuple[int, ...]
    item_dim: int
    index_dim: int
    dtype: torch.dtype

    @property
    def num_index_layers(self) -> int:
        return self.index_layer_of[-1] + 1

    @property
    def layer_of_buffer(self) -> tuple[int, ...]:
        """The layer after which each buffer is complete: one per layer, then one per index layer."""
        first_of_group = (self.index_layer_of.index(group) for group in range(self.num_index_layers))
        return *range(self.num_layers), *first_of_group

    @property
    def item_bytes(self) -> int:
        return self.item_dim * self.dtype.itemsize

    @property
    def index_key_bytes(self) -> int:
        return self.index_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, index keys included."""
        return self.num_layers * self.item_bytes + self.num_index_layers * self.index_key_bytes
