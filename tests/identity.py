"""The model that nodes of tests agree on, where no model computes."""

from control.messages import ModelIdentity

IDENTITY = ModelIdentity(
    fingerprint="f",
    dtype="float32",
    kv_format="float32",
    draft_layer=False,
    num_layers=2,
    num_index_layers=1,
    item_bytes=16,
    index_key_bytes=8,
)
