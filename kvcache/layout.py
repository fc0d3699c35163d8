"""The shape of KV that both tiers store."""

from dataclasses import dataclass


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

    @property
    def layer_of_buffer(self) -> tuple[int, ...]:
        """The layer after which each buffer is complete: one per layer, then one per index layer."""
        first_of_group = (self.index_layer_of.index(group) for group in range(self.num_index_layers))
        return *range(self.num_layers), *first_of_group

    def layers_of(self, index_layer: int) -> list[int]:
        """The layers that use an index layer's selection, in order."""
        first = self.index_layer_of.index(index_layer)
        return list(range(first, first + self.index_layer_of.count(index_layer)))

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, index keys included."""
        return self.num_layers * self.item_bytes + self.num_index_layers * self.index_key_bytes
