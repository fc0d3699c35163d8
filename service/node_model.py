"""What prefill and decode nodes start with alike: they read a checkpoint, join their group, and load the model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from control.messages import CheckpointIdentity
from kernels.attention import choose_backend
from kernels.dispatch import fp8_unavailable_reason
from kernels.ops import AttentionBackend
from model.loader import load_model, read_spec, resolve_dtype
from model.shard import NO_EXCHANGE, SINGLE_RANK, Exchange
from model.sparse_model import SparseModel
from model.spec import ModelSpec
from ranks.group import RankGroup
from ranks.rank_place import RankPlace
from service.checkpoint import identify, identity_of
from service.config import NodeConfig
from service.shell import NodeShell
from service.start import use_device


@dataclass(frozen=True)
class NodeModel:
    """What a node will compute with: known before it binds a port or reads a weight."""

    config: NodeConfig
    device: torch.device
    spec: ModelSpec
    checkpoint: CheckpointIdentity
    backend: AttentionBackend

    @classmethod
    def of(cls, config: NodeConfig) -> "NodeModel":
        """Raises StartupError if there is no such checkpoint or device, or if the backend cannot compute it there."""
        device = use_device(config.device)
        dtype = resolve_dtype(config.model_path, config.dtype)
        spec = read_spec(config.model_path, dtype, config.context_length, config.load_format, config.kv_cache_dtype)
        backend = choose_backend(config.attention_backend, device, spec)
        return cls(config, device, spec, identify(config.model_path), backend)

    def join(self, place: RankPlace, shell: NodeShell[Any]) -> RankGroup:
        """Meet the other ranks of the node.

        Takes the shell since that has bound this rank's ports: no rank may answer before all have theirs.
        """
        wake = partial(shell.inbox.put, None)
        return RankGroup(place, self.device, self.config.step_timeout, wake, shell.group_secret)

    def load(self, ranks: RankGroup | None) -> tuple[SparseModel, Exchange]:
        """The model, or this rank's part of it, and how it exchanges tokens with the others. Waits for all ranks.

        Raises StartupError for a checkpoint that cannot be served.
        """
        config = self.config
        exchange = NO_EXCHANGE if ranks is None else ranks.connect()
        model = load_model(
            config.model_path,
            self.spec.dtype,
            self.device,
            config.context_length,
            self.backend,
            config.load_format,
            shard=SINGLE_RANK if ranks is None else ranks.shard,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            exchange=exchange,
        )
        return model, exchange


def common_to_ranks(ranks: RankGroup, config: NodeConfig, spec: ModelSpec) -> dict[str, object]:
    """What the ranks of a node of either role need alike, for `RankGroup.check_equal`."""
    return {
        "version": f"{VERSION} (protocol {PROTOCOL_VERSION})",
        **identity_of(spec).model_dump(),
        "context_length": spec.context_length,
        "quantization": config.quantization,
        "device": ranks.device.type,
        "computes_in_fp8": fp8_unavailable_reason(ranks.device, spec.dtype) is None,
        "ranks": config.ranks,
    }
