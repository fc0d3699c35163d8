"""How KV is stored: the bytes of an item and of an index key, how they are written and how they are read.

Pools, transfers, checksums and swap-in only move bytes. A format defines what the bytes mean: the model encodes what it
computed, and attention and the indexer read it through the same format.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.fp8_kv import Fp8Layout

KVCacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
"""`--kv-cache-dtype`; auto: the type that the model computes in."""


class KVFormat(ABC):
    """What the bytes of items and index keys mean."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What nodes compare before KV passes between them."""

    @property
    def fp8_layout(self) -> Fp8Layout | None:
        """The layout of the bytes for kernels that read fp8; None: vectors of one type, which `items` is a view of."""
        return None

    @property
    @abstractmethod
    def item_bytes(self) -> int:
        """Of one token in one layer."""

    @property
    @abstractmethod
    def index_key_bytes(self) -> int:
        """Of one token in one index layer."""

    @abstractmethod
    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        """items: [N, item_dim] as the network computes them. Returns uint8 [N, item_bytes]."""

    @abstractmethod
    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """keys: [N, index_dim] as the network computes them. Returns uint8 [N, index_key_bytes]."""

    @abstractmethod
    def items(self, stored: torch.Tensor) -> torch.Tensor:
        """What attention reads, in a floating-point type of the format's choice.

        stored: uint8 [..., item_bytes]. Returns [..., item_dim].
        """

    @abstractmethod
    def items_at(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`items` of some rows. stored: uint8 [num_rows, item_bytes]. rows: int64. Returns [*rows.shape, item_dim]."""

    @abstractmethod
    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        """What the indexer reads: keys that are to be multiplied by `index_queries`.

        stored: uint8 [..., index_key_bytes]. Returns [..., index_dim] in a floating-point type of the format's choice.
        """

    def index_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Index queries [..., index_dim] in the coordinates in which index keys are stored."""
        return queries


@dataclass(frozen=True)
class DenseFormat(KVFormat):
    """Items and index keys as vectors of one floating-point type: encoding converts, reading is a view."""

    dtype: torch.dtype
    item_dim: int
    index_dim: int

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def item_bytes(self) -> int:
        return self.item_dim * self.dtype.itemsize

    @property
    def index_key_bytes(self) -> int:
        return self.index_dim * self.dtype.itemsize

    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        return items.to(self.dtype).contiguous().view(torch.uint8)

    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.to(self.dtype).contiguous().view(torch.uint8)

    def items(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.dtype)

    def items_at(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.items(stored)[rows]

    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.dtype)
