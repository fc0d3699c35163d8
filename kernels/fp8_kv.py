"""The bytes of KV in fp8: where the parts of items and of index keys lie. `kvcache.fp8_format` says what they mean.

An *item* is the latent's float8_e4m3 bytes, then float32 scales, one per started 128 elements of the latent, then the
RoPE part in bfloat16: 512 + 16 + 128 = 656 bytes for kv_lora_rank 512 and qk_rope_head_dim 64. An *index key* is the
key's float8_e4m3 bytes, then one float32 scale: 132 bytes for index_head_dim 128. All parts begin at multiples of 4.
"""

from dataclasses import dataclass

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
