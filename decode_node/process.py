"""Puts a decode process together."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import structlog
import torch

from base.errors import StartupError
from base.logs import configure_logging
from base.memory import available_host_bytes, device_split, human, pool_bytes
from control.keys import load_token
from control.membership import Membership
from control.messages import AttemptId, Heartbeat, Peer, Register
from decode_node.config import DecodeConfig
from decode_node.destination import destination_of
from decode_node.grammars import Grammars
from decode_node.group import check_alike, check_host_memory
from decode_node.lent_prefixes import hold_cached_prefix
from decode_node.limits import Limits
from decode_node.local_prefill import LocalPrefill
from decode_node.node import DecodeNode, Event
from decode_node.outputs import OutputStream
from decode_node.quarantine import Quarantine, quarantine_router
from decode_node.remote_prefill import RemotePrefill
from decode_node.scheduler import Scheduler
from decode_node.verifier import Verifier
from engine.chunked import ChunkedPrefill
from engine.grammar.vocabulary import Vocabulary
from engine.runner import ModelRunner
from hisparse.config import HiSparseConfig, parse_config
from hisparse.coordinator import HiSparseCoordinator
from hisparse.sizing import Sizes, describe, plan_sizes
from hisparse.tiers import build_tiers
from kvcache.extents import HostSlots
from kvcache.paged_pool import PagedKVPool
from model.sparse_model import SparseModel
from model.spec import ModelSpec
from ranks.group import RankGroup
from ranks.rank_place import RankPlace
from service.checkpoint import identity_of, stop_token_ids
from service.node_model import NodeModel
from service.shell import NodeShell
from service.start import check, claim_transfer_ports
from transfer.fencing import ReservationTable
from transfer.transports import Transports

log = structlog.get_logger(__name__)


def run_decode_node(config: DecodeConfig, place: RankPlace | None = None) -> None:
    """Serve until SIGTERM or SIGINT, as a rank of a group if this process has a place in one.

    Raises StartupError if it cannot start; cheap checks come first.
    """
    name = "decode" if place is None else f"decode-rank-{place.rank}"
    configure_logging(config.log_level, config.log_format, name)
    check(config)
    token = None if config.key_dir is None else load_token(config.key_dir)
    described = NodeModel.of(config)
    device, spec = described.device, described.spec
    hisparse = parse_config(config.hisparse_config, spec.index_topk)
    with ExitStack() as at_end:
        shell: NodeShell[Event] = NodeShell("decode", config)
        at_end.callback(shell.close)
        ports = claim_transfer_ports(config)
        log.info("attention backend", backend=described.backend.name)
        ranks = None
        if place is not None:
            ranks = described.join(place, shell)
            at_end.callback(ranks.close)
            check_alike(ranks, config, spec)
        model, _ = described.load(ranks)
        transports = Transports(config.data_host, config.transfer_protocol, config.ib_device, ports)
        coordinator = build_tiers(
            _plan(config, hisparse, spec, device, ranks),
            device,
            verify=config.debug_verify_swap_in,
            shareable=transports.share_memory,
        )
        at_end.callback(coordinator.close)
        destination = destination_of(coordinator.host, transports, identity_of(spec))
        transports.register(destination.buffers)
        # Before the pool is closed: late writes are refused from then on.
        at_end.callback(transports.unregister, destination.buffers)
        # Closed before the pool, too, which it reads.
        verifier = Verifier(destination.buffers, shell.inbox.put)
        at_end.callback(verifier.close)
        reservations: ReservationTable[AttemptId, Peer, HostSlots] = ReservationTable(
            coordinator.host.release, coordinator.host.retain, transports.cut
        )
        remote = RemotePrefill(
            shell.control,
            destination,
            reservations,
            verifier.submit,
            shell.metrics,
            config.prefill_timeout,
            on_lost=lambda request, reason: scheduler.retry(request, reason),
            on_landed=lambda request, cached: scheduler.landed(request, cached),
            lend=partial(hold_cached_prefix, coordinator.host),
            take_back=coordinator.host.release,
        )
        runner = ModelRunner(
            model,
            coordinator,
            config.max_running_requests,
            spec.context_length,
            record=device.type == "cuda" and not config.disable_cuda_graph,
        )
        if ranks is not None:
            # What happens at a first use takes longer than a step may.
            runner.pad(1)
            ranks.watch_steps()
        grammars = Grammars(
            lambda: Vocabulary.load(config.model_path, spec.vocab_size, stop_token_ids(config.model_path)),
            config.max_running_requests,
            pinned=device.type == "cuda",
            wake=lambda: shell.inbox.put(None),
        )
        at_end.callback(grammars.close)
        scheduler = Scheduler(
            runner,
            coordinator,
            remote,
            _local_prefill(config, model, coordinator),
            OutputStream(shell.control, shell.metrics),
            shell.metrics,
            Limits(
                context_length=spec.context_length,
                vocab_size=spec.vocab_size,
                host_slots=coordinator.host.num_slots,
                max_running=config.max_running_requests,
                max_waiting=config.max_queued_requests,
                prefill_retries=config.prefill_retries,
            ),
            grammars,
            ranks,
        )
        membership = Membership(
            shell.control,
            shell.gateways,
            register=lambda via: Register(
                via=via,
                role="decode",
                identity=destination.identity,
                transports=destination.transports,
                page_size=config.page_size,
                max_request_tokens=min(spec.context_length, coordinator.host.num_slots),
                local_prefill=config.allow_local_prefill,
                checkpoint=described.checkpoint,
            ),
            heartbeat=lambda via: Heartbeat(
                via=via,
                ready=True,
                queued_tokens=scheduler.outstanding_tokens,
                running_requests=coordinator.num_running,
            ),
        )
        node = DecodeNode(shell, scheduler, remote, coordinator, membership, ranks)
        quarantine = quarantine_router(
            Quarantine(reservations, shell.control, remote.lent), shell.inbox.put, token=token
        )
        prefixes = coordinator.host.prefixes
        shell.start(membership, node.refresh_metrics, quarantine, cached=None if prefixes is None else prefixes.blocks)
        shell.announce(transports, spec.model_type, spec.fingerprint)
        node.run()


def _plan(
    config: DecodeConfig,
    hisparse: HiSparseConfig,
    spec: ModelSpec,
    device: torch.device,
    ranks: RankGroup | None = None,
) -> Sizes:
    """Size the tiers and log the sizes. Ranks divide the memory of their host, before any has taken some for pools."""
    sharing = 1
    if ranks is not None:
        ranks.share(None)
        sharing = ranks.per_host
        if hisparse.host_pool_gib is not None:
            hisparse = replace(hisparse, host_pool_gib=hisparse.host_pool_gib / sharing)
    if split := device_split(device, config.mem_fraction_static):
        log.info("sized", what=split)
    for_pools = pool_bytes(device, config.mem_fraction_static) // (sharing if device.type == "cpu" else 1)
    host_bytes = available_host_bytes()
    for_local_prefill = _local_prefill_tokens(config, spec) * spec.kv_layout.token_bytes
    if for_local_prefill > for_pools:
        raise StartupError(
            f"--allow-local-prefill takes {human(for_local_prefill)} of device memory for one full context, but pools "
            f"may take {human(for_pools)}; lower --context-length, raise --mem-fraction-static or leave it out"
        )
    sizes = plan_sizes(
        hisparse,
        spec.kv_layout,
        max_running_requests=config.max_running_requests,
        context_length=spec.context_length,
        index_page_size=config.page_size,
        available_host_bytes=host_bytes,
        available_device_bytes=for_pools - for_local_prefill,
        max_device_slots=config.max_device_slots,
        has_prefix_cache=config.enable_prefix_caching,
    )
    if ranks is not None:
        check_host_memory(ranks, sizes, host_bytes)
    for line in describe(sizes):
        log.info("sized", what=line)
    return sizes


def _local_prefill_tokens(config: DecodeConfig, spec: ModelSpec) -> int:
    """Device pages, in tokens, for one full context: local prefill is a fallback, not the way to serve many."""
    return -(-spec.context_length // config.page_size) * config.page_size if config.allow_local_prefill else 0


def _local_prefill(config: DecodeConfig, model: SparseModel, coordinator: HiSparseCoordinator) -> LocalPrefill | None:
    if not config.allow_local_prefill:
        return None
    pages = _local_prefill_tokens(config, model.spec) // config.page_size
    pool = PagedKVPool(model.spec.kv_layout, pages, config.page_size, model.device)
    memory = human(pool.kv.nbytes + pool.index_keys.nbytes)
    log.info("sized", what=f"local prefill: {pages} pages of {config.page_size} tokens, {memory} (one full context)")
    return LocalPrefill(ChunkedPrefill(model, pool, config.chunked_prefill_size), coordinator)
