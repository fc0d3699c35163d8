"""What a node says of its model to those whose KV it takes or sends."""

from control.messages import ModelIdentity
from model.spec import ModelSpec


def identity_of(spec: ModelSpec) -> ModelIdentity:
    """What two nodes must have in common before KV passes between them."""
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
