"""A model's shapes and identity, which the rest of the service reads."""

from dataclasses import dataclass

import torch

from kvcache.format import DenseFormat, KVCacheDtype, KVFormat
from kvcache.fp8_format import Fp8Format
from kvcache.layout import KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a sparse-attention model's KV and the identity of its weights.

    A *layer* stores one KV item per token, of `item_dim` elements: the normed latent (`latent_dim`, kv_lora_rank), then
    the roped key (qk_rope_head_dim). An *index layer* is a layer with an indexer of its own; it stores one index key
    per token. `index_layer_of[layer]` is the index layer whose selection the layer uses: its own, or the previous one
    where the checkpoint shares selections between layers. `kv_cache_dtype` chooses `kv_format`.
    """

    model_type: str
    num_layers: int
    index_layer_of: tuple[int, ...]
    item_dim: int
    latent_dim: int
    index_dim: int
    index_topk: int
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    fingerprint: str
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def num_index_layers(self) -> int:
        return self.index_layer_of[-1] + 1

    @property
    def kv_format(self) -> KVFormat:
        """How items and index keys are stored. Raises ValueError for widths that the format does not take."""
        if self.kv_cache_dtype == "fp8_e4m3":
            return Fp8Format(self.latent_dim, self.item_dim - self.latent_dim, self.index_dim)
        dtype = self.dtype if self.kv_cache_dtype == "auto" else _DTYPES[self.kv_cache_dtype]
        return DenseFormat(dtype, self.item_dim, self.index_dim)

    @property
    def kv_layout(self) -> KVLayout:
        """What the KV tiers store of one token."""
        return KVLayout(self.index_layer_of, self.kv_format.item_bytes, self.kv_format.index_key_bytes)
