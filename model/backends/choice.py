"""Which attention backend a node runs, chosen once from its configuration."""

from typing import Literal

import structlog
import torch

from base.errors import StartupError
from model.backends.device import triton_obstacle
from model.backends.protocol import AttentionBackend
from model.backends.torch_backend import TorchBackend
from model.spec import ModelSpec

log = structlog.get_logger(__name__)

# What the registers and the shared memory of one program of the Triton kernels hold.
_MAX_LATENT_DIM = 512
_MAX_ROPE_DIM = 64
_MAX_INDEX_DIM = 128
_MAX_TOPK = 8192

BackendName = Literal["auto", "triton", "torch"]


def choose_backend(name: BackendName, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """The backend called `name`; `auto` is triton for bfloat16 on CUDA where it can run, else torch.

    float32 is for reproducing the reference token by token, which takes the order in which torch breaks ties among
    index scores. Raises StartupError for a backend that cannot run this model on this device.
    """
    wanted = "triton" if name == "auto" and device.type == "cuda" and spec.dtype == torch.bfloat16 else name
    obstacle = _obstacle(device, spec) if wanted == "triton" else None
    if obstacle is not None:
        if name == "triton":
            raise StartupError(f"--attention-backend triton {obstacle}; give --attention-backend torch or auto")
        log.warning("attention is computed by torch, which is slower", why=f"triton {obstacle}")
    if wanted != "triton" or obstacle is not None:
        return TorchBackend(spec.kv_format)
    # Here, since a machine that does not run it need not have Triton.
    from model.backends.triton_backend import TritonBackend

    return TritonBackend(spec.kv_format)


def _obstacle(device: torch.device, spec: ModelSpec) -> str | None:
    """Why the Triton backend cannot compute this model on this device; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device}"
    if obstacle := triton_obstacle():
        return obstacle
    for what, size, limit in (
        ("kv_lora_rank", spec.latent_dim, _MAX_LATENT_DIM),
        ("qk_rope_head_dim", spec.item_dim - spec.latent_dim, _MAX_ROPE_DIM),
        ("index_head_dim", spec.index_dim, _MAX_INDEX_DIM),
        ("index_topk", spec.index_topk, _MAX_TOPK),
    ):
        if size > limit:
            return f"takes a {what} of at most {limit}, not {size}"
    return None
