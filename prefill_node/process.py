"""Puts a prefill process together."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import structlog
import torch

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError
from base.logs import configure_logging
from base.memory import device_split, human, pool_bytes
from control.membership import Membership
from control.messages import Heartbeat, Peer, Register
from engine.chunked import ChunkedPrefill
from kvcache.page_cache import PageCache, can_cache
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from model.spec import ModelSpec
from model.split import SplitModel
from prefill_node.config import PrefillConfig
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.fetcher import FetchResources
from prefill_node.job import TransferJob
from prefill_node.landing import DeviceSink, HostSink
from prefill_node.model_engine import EngineParts, ModelEngine
from prefill_node.offer import Offer
from prefill_node.ranks.alike import check_alike
from prefill_node.ranks.follower import Follower
from prefill_node.ranks.gathering import PrefixGather
from prefill_node.ranks.leader import GroupEngine
from prefill_node.ring import SendRings
from prefill_node.sender import SendResources
from prefill_node.source import DeviceSource, HostSource, Reading
from ranks.group import RankGroup
from ranks.rank_place import RankPlace
from service.checkpoint import identity_of
from service.node_model import NodeModel
from service.shell import NodeShell
from service.start import check, claim_transfer_ports
from transfer.transports import Transports

log = structlog.get_logger(__name__)

_PROMPTS_BY_DEFAULT = 16


def run_prefill_node(config: PrefillConfig, place: RankPlace | None = None) -> None:
    """Serve until SIGTERM or SIGINT, as a rank of a group if this process has a place in one.

    Raises StartupError if it cannot start; cheap checks come first.
    """
    name = "prefill" if place is None else f"prefill-rank-{place.rank}"
    configure_logging(config.log_level, config.log_format, name)
    check(config)
    described = NodeModel.of(config)
    device, spec = described.device, described.spec
    with ExitStack() as at_end:
        shell: NodeShell[Any] = NodeShell("prefill", config)
        at_end.callback(shell.close)
        ports = claim_transfer_ports(config)
        log.info("attention backend", backend=described.backend.name)
        ranks = None
        if place is not None:
            ranks = described.join(place, shell)
            at_end.callback(ranks.close)
            check_alike(ranks, config, spec)
        model, exchange = described.load(ranks)
        if ranks is not None:
            model = SplitModel(model.network, spec, described.backend, ranks.shard, exchange.gather, ranks.begin_step)
        pool = PagedKVPool(spec.kv_layout, _num_pages(config, spec, device, ranks), config.page_size, device)
        layers = [*pool.kv, *pool.index_keys]
        transports = Transports(config.data_host, config.transfer_protocol, config.ib_device, ports)
        transports.register(pool.get_contiguous_buf_infos())
        others: list[Peer] = []
        if ranks is not None:
            warm_up(model, pool, config.chunked_prefill_size if device.type == "cuda" else 1)
            ranks.end_step()
            ranks.watch_steps()
            _, *others = [Peer.model_validate(peer) for peer in ranks.share(shell.control.me.model_dump())]
        offer = Offer(
            identity=identity_of(spec),
            transports=transports.offered,
            max_tokens=spec.context_length,
            vocab_size=spec.vocab_size,
            ranks=tuple(rank.boot_id for rank in others),
        )
        cache = PageCache(pool, _is_caching(config))
        prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(model, pool, config.chunked_prefill_size, cache)
        resources = SendResources(
            reading=Reading(
                source=HostSource(layers) if device.type == "cpu" else DeviceSource(layers),
                layer_of_buffer=pool.layout.layer_of_buffer,
                page_size=config.page_size,
                checksums=config.transfer_checksum,
            ),
            rings=SendRings(pin=device.type == "cuda", register=transports.register),
            connect=transports.connect,
            silence=shell.control.silence,
        )
        fetching = FetchResources(
            connect=transports.connect_to_read,
            silence=shell.control.silence,
            new_sink=lambda: HostSink(layers) if device.type == "cpu" else DeviceSink(layers, resources.rings),
            page_size=config.page_size,
        )
        gather = None if ranks is None else PrefixGather(pool, ranks.rank, exchange.gather, ranks.begin_step)
        if ranks is not None and gather is not None and ranks.rank:
            shell.start(None, lambda: None)
            Follower(shell, prefill, device, resources, fetching, gather, ranks).run()
            return
        parts = EngineParts(
            prefill=prefill,
            device=device,
            resources=resources,
            fetching=fetching,
            offer=offer,
            metrics=shell.metrics,
            wake=partial(shell.inbox.put, None),
            transfer_timeout=config.transfer_timeout,
            fetch_policy=config.fetch_prefixes,
        )
        engine = ModelEngine(parts) if ranks is None or gather is None else GroupEngine(parts, ranks, gather)
        at_end.callback(engine.close, timeout=1.0)
        membership = Membership(
            shell.control,
            shell.gateways,
            register=lambda via: Register(
                via=via,
                role="prefill",
                identity=offer.identity,
                transports=offer.transports,
                page_size=config.page_size,
                max_request_tokens=offer.max_tokens,
                checkpoint=described.checkpoint,
                ranks=tuple(others),
            ),
            heartbeat=lambda via: Heartbeat(
                via=via,
                ready=not engine.device_failed,
                queued_tokens=engine.queued_tokens,
                running_requests=len(engine.attempts),
            ),
        )
        shell.start(membership, engine.refresh_metrics, cached=cache.blocks)
        shell.announce(transports, spec.model_type, spec.fingerprint)
        PrefillEndpoint(shell, engine, ranks).run()
        if isinstance(engine, GroupEngine):
            engine.leave()


def _is_caching(config: PrefillConfig) -> bool:
    """Whether KV is kept for later prompts; logs why not."""
    if not config.enable_prefix_caching:
        log.info("prefix caching is off", why="--no-enable-prefix-caching")
    elif not can_cache(config.page_size):
        log.warning("prefix caching is off", why=f"--page-size {config.page_size} does not divide {BLOCK_TOKENS}")
    else:
        return True
    return False


def warm_up(model: SparseModel, pool: PagedKVPool, tokens: int) -> None:
    """Compute a chunk of so many tokens, as far as they fit: what happens at a first use takes longer than a step may.

    To be called before the pool is used.
    """
    tokens = min(tokens, pool.num_pages * pool.page_size, model.spec.context_length)
    pages = pool.allocate(tokens)
    assert pages is not None
    model.prefill([PrefillChunk(torch.zeros(tokens, dtype=torch.int64), 0, tokens + 1, PagedSequence(pool, pages))])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    pool.free(pages)


def _num_pages(config: PrefillConfig, spec: ModelSpec, device: torch.device, ranks: RankGroup | None = None) -> int:
    """Pages of the KV pool; logs why so many. Raises StartupError if a full context does not fit.

    All ranks have as many. On CPUs they divide the memory of their host, before any has taken some for its pool.
    """
    sharing = 1
    if ranks is not None:
        ranks.share(None)
        sharing = ranks.per_host if device.type == "cpu" else 1
    if split := device_split(device, config.mem_fraction_static):
        log.info("sized", what=split)
    token_bytes = spec.kv_layout.token_bytes
    affordable = pool_bytes(device, config.mem_fraction_static) // sharing // token_bytes
    if ranks is not None:
        affordable = min(ranks.share(affordable))
    wanted = config.max_total_tokens or min(affordable, _PROMPTS_BY_DEFAULT * spec.context_length)
    if wanted > affordable:
        raise StartupError(
            f"--max-total-tokens {wanted} takes {human(wanted * token_bytes)}, but {human(affordable * token_bytes)} "
            "may be used; lower it or raise --mem-fraction-static"
        )
    pages = wanted // config.page_size
    if pages * config.page_size < spec.context_length:
        raise StartupError(
            f"a KV pool of {pages} pages of {config.page_size} tokens does not hold one context of "
            f"{spec.context_length}; raise --max-total-tokens or --mem-fraction-static, or lower --context-length"
        )
    log.info(
        "KV pool",
        pages=pages,
        page_size=config.page_size,
        tokens=pages * config.page_size,
        bytes=human(pages * config.page_size * token_bytes),
        why=f"{token_bytes} B per token over {spec.num_layers} layers; "
        + ("--max-total-tokens" if config.max_total_tokens else f"up to {_PROMPTS_BY_DEFAULT} full contexts"),
    )
    return pages
