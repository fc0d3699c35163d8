"""How KV is stored: what a format of items and index keys has, and where the parts of those in fp8 lie.

Pools, transfers, checksums and swap-in only move bytes. The model encodes what it computed, and attention and the
indexer read it through the same format. `kvcache.format` has the formats.

An *item* is the latent's float8_e4m3 bytes, then float32 scales, one per started 128 elements of the latent, then the
RoPE part in bfloat16: 512 + 16 + 128 = 656 bytes for kv_lora_rank 512 and qk_rope_head_dim 64. An *index key* is the
key's float8_e4m3 bytes, then one float32 scale: 132 bytes for index_head_dim 128. All parts begin at multiples of 4.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

SCALED_TOGETHER = 128
"""Elements of a latent that share a scale."""
SCALE_BYTES = 4
ROPE_BYTES = 2
"""Of an element of the RoPE part."""


@dataclass(frozen=True)
class Fp8Layout:
    """Offsets and sizes in bytes, for widths in elements."""

    latent_dim: int
    rope_dim: int
    index_dim: int

    @property
    def num_scales(self) -> int:
        """Of an item."""
        return -(-self.latent_dim // SCALED_TOGETHER)

    @property
    def rope_at(self) -> int:
        """Where the RoPE part of an item begins, after the latent and its scales."""
        return self.latent_dim + self.num_scales * SCALE_BYTES

    @property
    def item_bytes(self) -> int:
        return self.rope_at + self.rope_dim * ROPE_BYTES

    @property
    def index_key_bytes(self) -> int:
        return self.index_dim + SCALE_BYTES


PUBLISHED = Fp8Layout(latent_dim=512, rope_dim=64, index_dim=128)
"""The widths of all published models, which the kernels of csrc/ are compiled for."""


class KVFormat(ABC):
    """What the bytes of items and index keys mean, and how many there are."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What nodes compare before KV passes between them."""

    @property
    @abstractmethod
    def item_bytes(self) -> int:
        """Of one token in one layer."""

    @property
    @abstractmethod
    def index_key_bytes(self) -> int:
        """Of one token in one index layer."""

    @property
    def fp8_layout(self) -> Fp8Layout | None:
        """The layout of the bytes for kernels that read fp8; None: vectors of one type, which `items` is a view of."""
        return None

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

    def triton_refusal(self, computed: torch.dtype) -> str | None:
        """Why `kernels.triton.attention.backend_for` has no backend for a model that computes in that type; None if it
        has one."""
        return f"does not read KV in {self.name}"
