"""How prefill and decode nodes start: they read a checkpoint, bind ports, join their group, and load the model.

`NodeModel.of` does what takes no time, so that a wrong configuration is refused at once. `start` does the rest.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog
import torch

from base.errors import StartupError
from base.logs import configure_logging
from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from control.messages import CheckpointIdentity, Role
from kernels.attention import AttentionBackend
from kernels.ops import fp8_unavailable_reason
from model.config import ModelSpec
from model.loader import choose_backend, has_draft_layer, load_model, read_spec, resolve_dtype
from model.shard import Exchange
from model.sparse_model import SparseModel
from ranks.group import RankGroup, Ranks, SingleRank
from ranks.place import RankPlace
from service.checkpoint import identify, identity_of
from service.config import NodeConfig, drafts_of
from service.node_checks import check, claim_transfer_ports
from service.shell import NodeShell
from transfer.transports import Transports

log = structlog.get_logger(__name__)

Plan = TypeVar("Plan")

_SHORTEST = 2
"""Tokens of a context: a prompt's and its answer's."""


@dataclass(frozen=True)
class StartedNode:
    """What a node of either role has before it makes its pools. exchange: connects the model with other ranks."""

    shell: NodeShell[Any]
    ranks: Ranks
    model: SparseModel
    exchange: Exchange
    transports: Transports


@dataclass(frozen=True)
class NodeModel:
    """What a node will compute with: known before it binds a port or reads a weight."""

    role: Role
    config: NodeConfig
    place: RankPlace | None
    """Where this process stands in its group; None if it is a node by itself."""
    device: torch.device
    spec: ModelSpec
    drafts: int
    """Tokens that a decode step drafts at most."""
    checkpoint: CheckpointIdentity
    backend: AttentionBackend

    @classmethod
    def of(cls, role: Role, config: NodeConfig, place: RankPlace | None = None) -> "NodeModel":
        """Configures the logs, too. Raises StartupError for invalid values, if there is no such checkpoint or device,
        or if the backend cannot compute it there."""
        name = role if place is None else f"{role}-rank-{place.rank}"
        configure_logging(config.log_level, config.log_format, name)
        check(config)
        device = use_device(config.device)
        dtype = resolve_dtype(config.model_path, config.dtype)
        can_draft = has_draft_layer(config.model_path, config.load_format)
        drafts = drafts_of(config.speculative_num_steps, can_draft)
        spec = read_spec(
            config.model_path,
            dtype,
            config.context_length,
            config.load_format,
            config.kv_cache_dtype,
            drafts=drafts > 0,
        )
        backend = choose_backend(config.attention_backend, device, spec)
        return cls(role, config, place, device, spec, drafts, identify(config.model_path), backend)

    @contextmanager
    def start(self, fit: Callable[[Ranks, int], object]) -> Iterator[StartedNode]:
        """Start, and close at the end, what a node of either role has. Waits for all ranks.

        fit: called with the bytes of the weights before they are read, to raise StartupError if what they leave is too
        little. Raises StartupError for a port that is taken, a checkpoint that cannot be served, or ranks that differ.
        """
        config = self.config
        with ExitStack() as at_end:
            shell: NodeShell[Any] = NodeShell(self.role, config, 0 if self.place is None else self.place.rank)
            at_end.callback(shell.close)
            ports = claim_transfer_ports(config)
            log.info("attention backend", backend=self.backend.name)
            # After the ports are bound: no rank may answer before all have theirs.
            ranks = self._join(shell)
            at_end.callback(ranks.close)
            ranks.check_same_config(common_to_ranks(ranks, config, self.spec))
            exchange = ranks.connect()
            model = load_model(
                config.model_path,
                self.spec.dtype,
                self.device,
                config.context_length,
                self.backend,
                config.load_format,
                shard=ranks.shard,
                quantization=config.quantization,
                kv_cache_dtype=config.kv_cache_dtype,
                exchange=exchange,
                drafts=self.drafts > 0,
                planned_for=partial(fit, ranks),
            )
            transports = Transports(config.data_host, config.transfer_protocol, config.ib_device, ports)
            yield StartedNode(shell, ranks, model, exchange, transports)

    def _join(self, shell: NodeShell[Any]) -> Ranks:
        if self.place is None:
            return SingleRank(self.device)
        wake = partial(shell.inbox.put, None)
        return RankGroup(self.place, self.device, self.config.step_timeout, wake, shell.group_secret)


def common_to_ranks(ranks: Ranks, config: NodeConfig, spec: ModelSpec) -> dict[str, object]:
    """What the ranks of a node need alike, for `Ranks.check_same_config`."""
    return {
        "version": f"{VERSION} (protocol {PROTOCOL_VERSION})",
        **identity_of(spec).model_dump(),
        "context_length": spec.context_length,
        "device": ranks.device.type,
        "computes_in_fp8": fp8_unavailable_reason(ranks.device, spec.dtype) is None,
        **{name: getattr(config, name) for name in config.alike_in_ranks},
    }


def fit_context(spec: ModelSpec, asked: int | None, plan: Callable[[ModelSpec], Plan]) -> tuple[ModelSpec, Plan]:
    """The plan of the node's pools, and the specification that it is for.

    plan: pools for the context of a specification. Raises StartupError if they do not fit; a longer context takes more.
    Raises what `plan` raises for the context that was asked for, or for the model's own if not even the shortest fits.
    """
    try:
        return spec, plan(spec)
    except StartupError as error:
        if asked is not None:
            raise
        reason = error

    def fails(context_length: int) -> bool:
        try:
            plan(replace(spec, context_length=context_length))
        except StartupError:
            return True
        return False

    longest = bisect_left(range(spec.context_length), True, lo=_SHORTEST, key=fails) - 1
    if longest < _SHORTEST:
        raise reason
    log.warning("the context is shorter than the model's", tokens=longest, model=spec.context_length, why=str(reason))
    fitting = replace(spec, context_length=longest)
    return fitting, plan(fitting)


def use_device(flag: str) -> torch.device:
    """The device that --device names. Hides all other GPUs from this process, so a GPU is always `cuda:0`.

    Libraries touch the first device that they see, from threads of their own, and would take memory on another
    process's GPU. Raises StartupError if there is no such device.
    """
    kind, _, number = flag.partition(":")
    if kind == "cpu" and not number:
        return torch.device("cpu")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise StartupError(f"--device {flag}: expected cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if int(number or 0) >= found:
        raise StartupError(f"--device {flag}: this machine has {found} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number or 0)]
    return torch.device("cuda", 0)
