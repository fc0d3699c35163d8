"""Puts a prefill process together."""

from contextlib import ExitStack

import structlog
import torch

from base.errors import StartupError
from base.logs import configure_logging
from base.memory import device_split, human, pool_bytes
from control.block_hashes import BLOCK_TOKENS
from control.cache_reports import CacheReports
from control.membership import Membership
from control.messages import Heartbeat, Message, Peer, Register
from engine.chunked import ChunkedPrefill
from engine.identity import identity_of
from engine.page_cache import PageCache, can_cache
from engine.paged_pool import PagedKVPool
from model.backends.choice import choose_backend
from model.loader import load_model, read_spec, resolve_dtype
from model.spec import ModelSpec
from prefill_node.config import PrefillConfig
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.job import TransferJob
from prefill_node.model_engine import ModelEngine
from prefill_node.offer import Offer
from prefill_node.ring import SendRings
from prefill_node.sender import SendResources
from prefill_node.source import DeviceSource, HostSource, Reading
from service.checkpoint import identify
from service.shell import NodeShell
from service.start import check, claim_transfer_ports, use_device
from transfer.routes import Transports

log = structlog.get_logger(__name__)

_PROMPTS_BY_DEFAULT = 16


def run_prefill_node(config: PrefillConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError if it cannot start; cheap checks come first."""
    configure_logging(config.log_level, config.log_format, "prefill")
    check(config)
    device = use_device(config.device)
    dtype = resolve_dtype(config.model_path, config.dtype)
    spec = read_spec(config.model_path, dtype, config.context_length, config.load_format, config.kv_cache_dtype)
    checkpoint = identify(config.model_path)
    backend = choose_backend(config.attention_backend, device, spec)
    with ExitStack() as at_end:
        shell: NodeShell[tuple[Peer, Message]] = NodeShell("prefill", config)
        at_end.callback(shell.close)
        ports = claim_transfer_ports(config)
        log.info("attention backend", backend=backend.name)
        model = load_model(
            config.model_path,
            dtype,
            device,
            config.context_length,
            backend,
            config.load_format,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        pool = PagedKVPool(spec.kv_layout, _num_pages(config, spec, device), config.page_size, device)
        layers = [*pool.kv, *pool.index_keys]
        transports = Transports(config.data_host, config.transfer_protocol, config.ib_device, ports)
        transports.register(pool.get_contiguous_buf_infos())
        offer = Offer(
            identity=identity_of(spec),
            transports=transports.offered,
            max_tokens=spec.context_length,
            vocab_size=spec.vocab_size,
        )
        cache = PageCache(pool, spec.vocab_size if _is_caching(config) else None, shell.cache_seed)
        prefill: ChunkedPrefill[TransferJob] = ChunkedPrefill(model, pool, config.chunked_prefill_size, cache)
        engine = ModelEngine(
            prefill,
            device,
            SendResources(
                reading=Reading(
                    source=HostSource(layers) if device.type == "cpu" else DeviceSource(layers),
                    layer_of_buffer=pool.layout.layer_of_buffer,
                    page_size=config.page_size,
                    checksums=config.transfer_checksum,
                ),
                rings=SendRings(pin=device.type == "cuda", register=transports.register),
                connect=transports.connect,
                silence=shell.control.silence,
            ),
            offer,
            shell.metrics,
            wake=lambda: shell.inbox.put(None),
            transfer_timeout=config.transfer_timeout,
        )
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
                checkpoint=checkpoint,
            ),
            heartbeat=lambda via: Heartbeat(
                via=via,
                ready=not engine.device_failed,
                queued_tokens=engine.queued_tokens,
                running_requests=len(engine.attempts),
            ),
        )
        if cache.is_on:
            cache.reports = CacheReports(membership, cache.newest)
        shell.start(membership, engine.refresh_metrics)
        shell.announce(transports, spec.model_type, spec.fingerprint)
        PrefillEndpoint(shell, engine).run()


def _is_caching(config: PrefillConfig) -> bool:
    """Whether KV is kept for later prompts; logs why not."""
    if not config.enable_prefix_caching:
        log.info("prefix caching is off", why="--no-enable-prefix-caching")
    elif not can_cache(config.page_size):
        log.warning("prefix caching is off", why=f"--page-size {config.page_size} does not divide {BLOCK_TOKENS}")
    else:
        return True
    return False


def _num_pages(config: PrefillConfig, spec: ModelSpec, device: torch.device) -> int:
    """Pages of the KV pool; logs why so many. Raises StartupError if a full context does not fit."""
    if split := device_split(device, config.mem_fraction_static):
        log.info("sized", what=split)
    token_bytes = spec.kv_layout.token_bytes
    affordable = pool_bytes(device, config.mem_fraction_static) // token_bytes
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
