"""The names of KV formats, in a module that imports nothing slow."""

from typing import Literal

KVCacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
"""`--kv-cache-dtype`; auto: the type that the model computes in. `kvcache.format.kv_format` makes each."""
