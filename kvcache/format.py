"""How KV is stored: the bytes of an item and of an index key, how they are written and how they are read.

Pools, transfers, checksums and swap-in only move bytes. A format defines what the bytes mean: the model encodes what it
computed, and attention and the indexer read it through the same format.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.ops import KVCodec

KVCacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
"""`--kv-cache-dtype`; auto: the type that the model computes in."""


class KVFormat(KVCodec):
    """What the bytes of items and index keys mean, and how many there are."""

    @property
    @abstractmethod
    def item_bytes(self) -> int:
        """Of one token in one layer."""

    @property
    @abstractmethod
    def index_key_bytes(self) -> int:
        """Of one token in one index layer."""


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
