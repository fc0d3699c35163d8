"""Which attention backend a node runs, chosen once from its configuration."""

import importlib
from typing import Literal

import structlog
import torch

from base.errors import StartupError
from kvcache.fp8_format import Fp8Format
from model.backends.device import MIN_TILE, triton_obstacle
from model.backends.protocol import AttentionBackend
from model.backends.torch_backend import TorchBackend
from model.spec import ModelSpec

log = structlog.get_logger(__name__)

BackendName = Literal["auto", "triton", "torch"]


def choose_backend(name: BackendName, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """The backend called `name`; `auto` is triton for bfloat16 on CUDA where it can run, else torch.

    float32 is for reproducing the reference token by token, which takes the order in which torch breaks ties among
    index scores. Raises StartupError for a backend that cannot run this model on this device.
    """
    if name == "torch" or (name == "auto" and not (device.type == "cuda" and spec.dtype == torch.bfloat16)):
        return TorchBackend(spec.kv_format)
    obstacle = _obstacle(device, spec)
    if obstacle is None:
        # Here, since a machine that does not run it need not have what it is made of.
        from model.backends.triton_backend import TritonBackend

        return TritonBackend(spec.kv_format)
    if name == "triton":
        raise StartupError(f"--attention-backend triton {obstacle}; give --attention-backend torch or auto")
    log.warning("attention is computed by torch, which is slower", why=f"triton {obstacle}")
    return TorchBackend(spec.kv_format)


def _obstacle(device: torch.device, spec: ModelSpec) -> str | None:
    """Why the Triton backend cannot compute this model on this device; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device}"
    if obstacle := triton_obstacle():
        return obstacle
    try:
        importlib.import_module("kernels.top_k")
    except ImportError as error:
        return f"needs {error.name}, which compiles its top-k kernel: install hisparse-pd[kernels]"
    if isinstance(spec.kv_format, Fp8Format):
        if spec.dtype != torch.bfloat16:
            return f"reads fp8 KV in bfloat16 models, not in {spec.dtype}"
        if spec.index_dim < MIN_TILE:
            return f"reads fp8 index keys with an index_head_dim of {MIN_TILE} or more, not {spec.index_dim}"
    elif spec.kv_format.name != (computed := str(spec.dtype).removeprefix("torch.")):
        return f"reads KV of the type that it computes in, {computed}, or fp8_e4m3, not {spec.kv_format.name}"
    # What the registers and the shared memory of one program of the Triton kernels hold.
    for what, size, limit in (
        ("kv_lora_rank", spec.latent_dim, 512),
        ("qk_rope_head_dim", spec.item_dim - spec.latent_dim, 64),
        ("index_head_dim", spec.index_dim, 128),
    ):
        if size > limit:
            return f"takes a {what} of at most {limit}, not {size}"
    return None
