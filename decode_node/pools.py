"""The pools of a decode node: how large they are, and how prefill nodes address the one in host memory."""

from dataclasses import replace

import structlog

from base.errors import StartupError
from base.memory import available_host_bytes, device_split, human, pool_bytes
from control.messages import Destination, ModelIdentity
from decode_node.config import DecodeConfig
from decode_node.local_prefill import LocalPrefill
from engine.chunked import ChunkedPrefill
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.sizing import Sizes, describe, plan_sizes, step_window
from hisparse.tiers import largest_buffer
from kvcache.host_pool import HostKVPool
from kvcache.paged_pool import PagedKVPool
from model.config import ModelSpec
from model.sparse_model import SparseModel
from ranks.group import Ranks
from service.node_model import fit_context
from transfer.transports import Transports

log = structlog.get_logger(__name__)


def fit_pools(
    config: DecodeConfig, hisparse: HiSparseConfig, spec: ModelSpec, max_drafts: int, ranks: Ranks, to_load: int = 0
) -> tuple[ModelSpec, Sizes]:
    """The sizes of the tiers, and the specification with the context that they hold, the same in all ranks.

    Ranks divide the memory of their host, before any has taken some for pools. to_load: bytes of weights that the
    device is yet to get. Raises StartupError if the pools do not fit, those of the host's other ranks included.
    """
    ranks.share(None)
    sharing, on_cpu = ranks.per_host, ranks.device.type == "cpu"
    if hisparse.host_pool_gib is not None:
        hisparse = replace(hisparse, host_pool_gib=hisparse.host_pool_gib / sharing)
    of_host = to_load * sharing if on_cpu else 0
    for_pools = pool_bytes(ranks.device, config.mem_fraction_static, of_host if on_cpu else to_load)
    own = [for_pools // (sharing if on_cpu else 1), available_host_bytes() - of_host]
    device_bytes, host_bytes = (min(each) for each in zip(*ranks.share(own), strict=True))

    def plan(spec: ModelSpec) -> Sizes:
        for_local_prefill = _local_prefill_tokens(config, spec) * spec.kv_layout.token_bytes
        if for_local_prefill > device_bytes:
            raise StartupError(
                f"--allow-local-prefill takes {human(for_local_prefill)} of device memory for one full context, but "
                f"pools may take {human(device_bytes)}; lower --context-length, raise --mem-fraction-static or leave "
                "it out"
            )
        return plan_sizes(
            hisparse,
            spec.kv_layout,
            max_running_requests=config.max_running_requests,
            context_length=spec.context_length,
            index_page_size=config.page_size,
            available_host_bytes=host_bytes,
            available_device_bytes=device_bytes - for_local_prefill,
            max_device_slots=config.max_device_slots,
            has_prefix_cache=config.enable_prefix_caching,
            window=step_window(max_drafts),
            fill_memory=not on_cpu,
            largest_buffer=largest_buffer(hisparse, spec.context_length, max_drafts, ranks.device),
        )

    spec, sizes = fit_context(spec, config.context_length, plan)
    _check_host_memory(ranks, sizes, host_bytes)
    return spec, sizes


def plan_pools(
    config: DecodeConfig, hisparse: HiSparseConfig, spec: ModelSpec, max_drafts: int, ranks: Ranks
) -> tuple[ModelSpec, Sizes]:
    """`fit_pools` once the weights are loaded; logs the sizes."""
    if split := device_split(ranks.device, config.mem_fraction_static):
        log.info("sized", what=split)
    spec, sizes = fit_pools(config, hisparse, spec, max_drafts, ranks)
    for line in describe(sizes):
        log.info("sized", what=line)
    return spec, sizes


def make_local_prefill(
    config: DecodeConfig, spec: ModelSpec, model: SparseModel, coordinator: HiSparseCoordinator
) -> LocalPrefill | None:
    """What computes prompts here, with device pages for one full context; None if the node is not to."""
    if not config.allow_local_prefill:
        return None
    pages = _local_prefill_tokens(config, spec) // config.page_size
    pool = PagedKVPool(spec.kv_layout, pages, config.page_size, model.device)
    memory = human(pool.kv.nbytes + pool.index_keys.nbytes)
    log.info("sized", what=f"local prefill: {pages} pages of {config.page_size} tokens, {memory} (one full context)")
    return LocalPrefill(model, ChunkedPrefill(pool, config.chunked_prefill_size), coordinator)


def destination_of(host: HostKVPool, transports: Transports, identity: ModelIdentity) -> Destination:
    """What a prefill node needs to write into the pool. The caller registers the buffers with the transports.

    Processes of the same host can map a shareable pool instead, by this process's id and the memory's file descriptor.
    """
    return Destination(
        identity=identity,
        buffers=host.get_contiguous_buf_infos(),
        sessions=transports.sessions,
        shared=host.shared(),
    )


def _check_host_memory(ranks: Ranks, sizes: Sizes, available: int) -> None:
    """Raises StartupError if the pools of a host's ranks do not fit together. available: bytes before any was made."""
    shared = ranks.share_on_host([sizes.host_bytes + sizes.prefix_cache_bytes, available])
    pools = [pool for pool, _ in shared]
    least = min(free for _, free in shared)
    if sum(pools) > least:
        raise StartupError(
            f"the host pools of {len(pools)} ranks need {human(sum(pools))} together, available are {human(least)}: "
            "lower host_to_device_ratio or host_pool_gib"
        )


def _local_prefill_tokens(config: DecodeConfig, spec: ModelSpec) -> int:
    """Device pages, in tokens, for one full context: local prefill is a fallback, not the way to serve many."""
    return -(-spec.context_length // config.page_size) * config.page_size if config.allow_local_prefill else 0
