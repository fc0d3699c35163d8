"""A model's shapes and identity, which the rest of the service reads."""

from dataclasses import dataclass

import torch

from hisparse.format import KVFormat
from hisparse.layout import KVLayout


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a sparse-attention model's KV and the identity of its weights.

    A *layer* stores one KV item per token, of `item_dim` elements: the normed latent (`latent_dim`, kv_lora_rank), then
    the roped key (qk_rope_head_dim). An *index layer* is a layer with an indexer of its own; it stores one index key
    per token. `index_layer_of[layer]` is the index layer whose selection the layer uses: its own, or the previous one
    where the checkpoint shares selections between layers.
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

    @property
    def num_index_layers(self) -> int:
        return self.index_layer_of[-1] + 1

    @property
    def kv_format(self) -> KVFormat:
        """How items and index keys are stored."""
        return KVFormat(self.dtype, self.item_dim, self.index_dim)

    @property
    def kv_layout(self) -> KVLayout:
        """What the KV tiers store of one token."""
        return KVLayout(self.index_layer_of, self.kv_format.item_bytes, self.kv_format.index_key_bytes)
