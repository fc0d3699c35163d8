"""Puts a prefill process together."""

from contextlib import ExitStack
from functools import partial

import structlog
import torch

from base.block_hashes import BLOCK_TOKENS
from control.membership import Membership
from control.messages import Heartbeat, NodeTotals, Peer, Register
from engine.chunked import ChunkedPrefill
from kvcache.page_cache import PageCache, can_cache
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from model.split import SplitModel
from prefill_node.attempt import HeldAttempt
from prefill_node.config import PrefillConfig
from prefill_node.endpoint import PrefillEndpoint
from prefill_node.offer import Offer
from prefill_node.orders import OF_FIRST, End
from prefill_node.planner import PrefillPlanner
from prefill_node.pool import fit_pages, plan_pages
from prefill_node.worker import PrefillWorker, RankLoop
from ranks.executor import Executor
from ranks.place import RankPlace
from service.checkpoint import identity_of
from service.node_model import NodeModel

log = structlog.get_logger(__name__)


def run_prefill_node(config: PrefillConfig, place: RankPlace | None = None) -> None:
    """Serve until SIGTERM or SIGINT, as a rank of a group if this process has a place in one.

    Raises StartupError if it cannot start; cheap checks come first.
    """
    described = NodeModel.of("prefill", config, place)
    device, fit = described.device, partial(fit_pages, config, described.spec)
    with ExitStack() as at_end:
        node = at_end.enter_context(described.start(fit))
        shell, ranks, model, exchange, transports = node.shell, node.ranks, node.model, node.exchange, node.transports
        spec, pages = plan_pages(config, described.spec, ranks)
        if ranks.world_size > 1:
            model = SplitModel(model.network, spec, described.backend, ranks.shard, exchange.gather)
        pool = PagedKVPool(spec.kv_layout, pages, config.page_size, device)
        transports.register(pool.get_contiguous_buf_infos())
        if ranks.world_size > 1:
            warm_up(model, pool, config.chunked_prefill_size if device.type == "cuda" else 1)
        ranks.watch_steps()
        _, *others = [Peer.model_validate(peer) for peer in ranks.share(shell.control.me.model_dump())]
        silence, checksums = shell.control.silence, config.transfer_checksum
        new_worker = partial(PrefillWorker, model, pool, transports, silence, checksums, exchange.gather, ranks)
        if ranks.rank:
            shell.start(None, lambda: None)
            RankLoop(shell, ranks, new_worker).run()
            return
        offer = Offer(
            identity=identity_of(spec),
            transports=transports.offered,
            max_tokens=spec.context_length,
            vocab_size=spec.vocab_size,
            ranks=tuple(rank.boot_id for rank in others),
        )
        cache = PageCache(pool, _is_caching(config))
        prefill: ChunkedPrefill[HeldAttempt] = ChunkedPrefill(pool, config.chunked_prefill_size, cache)
        executor = Executor(ranks, new_worker, OF_FIRST, partial(shell.inbox.put, None))
        at_end.callback(executor.close, timeout=1.0)
        planner = PrefillPlanner(
            prefill,
            executor,
            offer,
            shell.metrics,
            config.transfer_timeout,
            config.fetch_prefixes,
            shell.tracer,
        )
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
                ready=not planner.has_failed,
                queued_tokens=prefill.queued_tokens,
                running_requests=len(planner.held),
                kv_usage=prefill.kv_usage,
                totals=NodeTotals(transferred_bytes=planner.sent_bytes),
            ),
        )
        shell.start(membership, planner.refresh_metrics, cached=cache.blocks)
        shell.announce(transports, spec.model_type, spec.fingerprint)
        PrefillEndpoint(shell, planner, ranks).run()
        executor.leave(End())


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
    """Compute a chunk of `tokens` tokens, or as many as fit: a first use may take longer than the step timeout.

    To be called before the pool is used.
    """
    tokens = min(tokens, pool.num_pages * pool.page_size, model.spec.context_length)
    pages = pool.allocate(tokens)
    assert pages is not None
    prompt = torch.zeros(tokens + 1, dtype=torch.int64)
    model.prefill([PrefillChunk.of(prompt, 0, tokens, PagedSequence(pool, pages))])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    pool.free(pages)
