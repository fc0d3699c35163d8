"""The identity of a node's model, which prefill and decode nodes compare."""

from control.messages import ModelIdentity
from model.config import ModelSpec


def identity_of(spec: ModelSpec) -> ModelIdentity:
    """Everything that must be equal on two nodes before KV passes between them."""
    layout = spec.kv_layout
    return ModelIdentity(
        fingerprint=spec.fingerprint,
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_format=spec.kv_format.name,
        num_layers=layout.num_layers,
        num_index_layers=layout.num_index_layers,
        item_bytes=layout.item_bytes,
        index_key_bytes=layout.index_key_bytes,
    )
