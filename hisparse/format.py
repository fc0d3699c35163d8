"""How KV is stored: the bytes of an item and of an index key, how they are written and how they are read.

Pools, transfers, checksums and swap-in only move bytes. A format defines what the bytes mean: the model encodes what it
computed, and attention and the indexer read it through the same format.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVFormat:
    """Items and index keys as vectors of one floating-point type: encoding converts, reading is a view."""

    dtype: torch.dtype
    item_dim: int
    index_dim: int

    @property
    def name(self) -> str:
        """What nodes compare before KV passes between them."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def item_bytes(self) -> int:
        """Of one token in one layer."""
        return self.item_dim * self.dtype.itemsize

    @property
    def index_key_bytes(self) -> int:
        """Of one token in one index layer."""
        return self.index_dim * self.dtype.itemsize

    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        """items: [N, item_dim] as the network computes them. Returns uint8 [N, item_bytes]."""
        return items.to(self.dtype).contiguous().view(torch.uint8)

    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """keys: [N, index_dim] as the network computes them. Returns uint8 [N, index_key_bytes]."""
        return keys.to(self.dtype).contiguous().view(torch.uint8)

    def items(self, stored: torch.Tensor) -> torch.Tensor:
        """What attention reads. stored: uint8 [..., item_bytes]. Returns [..., item_dim]."""
        return stored.view(self.dtype)

    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        """What the indexer reads. stored: uint8 [..., index_key_bytes]. Returns [..., index_dim]."""
        return stored.view(self.dtype)
