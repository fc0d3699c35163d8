"""Puts a decode process together."""

from contextlib import ExitStack
from functools import partial

from control.keys import load_token
from control.membership import Membership
from control.messages import Heartbeat, NodeTotals, Register
from decode_node.config import DecodeConfig
from decode_node.grammars import Grammars
from decode_node.node import DecodeNode
from decode_node.outputs import OutputStream
from decode_node.pools import destination_of, fit_pools, make_local_prefill, plan_pools
from decode_node.quarantine import quarantine_router
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Limits
from decode_node.scheduler import Scheduler
from decode_node.verifier import Verifier
from engine.draft_policy import StepSize, policy_of
from engine.grammar.vocabulary import Vocabulary
from engine.runner import ModelRunner
from hisparse.config import parse_config
from hisparse.swap_in import SwapInCounters
from hisparse.tiers import build_tiers
from ranks.place import RankPlace
from service.checkpoint import identity_of, stop_token_ids
from service.node_model import NodeModel


def run_decode_node(config: DecodeConfig, place: RankPlace | None = None) -> None:
    """Serve until SIGTERM or SIGINT, as a rank of a group if this process has a place in one.

    Raises StartupError if it cannot start; cheap checks come first.
    """
    described = NodeModel.of("decode", config, place)
    device = described.device
    token = None if config.key_dir is None else load_token(config.key_dir)
    hisparse = parse_config(config.hisparse_config, described.spec.index_topk)
    fit = partial(fit_pools, config, hisparse, described.spec, described.drafts)
    with ExitStack() as at_end:
        node = at_end.enter_context(described.start(fit))
        shell, ranks, model, transports = node.shell, node.ranks, node.model, node.transports
        rank_group, *_ = ranks.share(shell.control.me.boot_id)
        spec, sizes = plan_pools(config, hisparse, described.spec, described.drafts, ranks)
        coordinator = build_tiers(
            sizes,
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
        remote = RemotePrefill(
            shell.control,
            destination,
            coordinator.host,
            transports.cut,
            verifier.submit,
            shell.metrics,
            config.prefill_timeout,
            on_lost=lambda request, reason: scheduler.retry(request, reason),
            on_landed=lambda request, cached: scheduler.slots.landed(request, cached),
        )
        runner = ModelRunner(
            model,
            coordinator,
            config.max_running_requests,
            spec.context_length,
            record=device.type == "cuda" and not config.disable_cuda_graph,
            policy=policy_of(config.speculative_num_steps, described.drafts),
        )
        # What happens at a first use takes longer than a step may.
        runner.pad(StepSize(1, runner.policy.max_width))
        ranks.watch_steps()
        grammars = Grammars(
            lambda: Vocabulary.load(config.model_path, spec.vocab_size, stop_token_ids(config.model_path)),
            config.max_running_requests * runner.policy.max_width,
            pinned=device.type == "cuda",
            wake=lambda: shell.inbox.put(None),
        )
        at_end.callback(grammars.close)
        scheduler = Scheduler(
            runner,
            coordinator,
            remote,
            make_local_prefill(config, spec, model, coordinator),
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
            shell.tracer,
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
                rank_group=rank_group,
            ),
            heartbeat=lambda via: Heartbeat(
                via=via,
                ready=True,
                queued_tokens=scheduler.outstanding_tokens,
                running_requests=coordinator.num_running,
                kv_usage=coordinator.host.usage,
                hot_usage=coordinator.device.usage,
                totals=_totals(coordinator.counted),
            ),
        )
        loop = DecodeNode(shell, scheduler, remote, coordinator, membership, ranks)
        quarantine = quarantine_router(remote.quarantine, shell.inbox.put, token=token)
        prefixes = coordinator.host.prefixes
        shell.start(membership, loop.refresh_metrics, quarantine, cached=None if prefixes is None else prefixes.blocks)
        shell.announce(transports, spec.model_type, spec.fingerprint)
        loop.run()
        # Before the ranks disconnect. Not after a failure: a step may wait for a rank that is gone.
        runner.close()


def _totals(counters: SwapInCounters) -> NodeTotals:
    return NodeTotals(hits=counters.hits, misses=counters.misses, swapped_bytes=counters.bytes)
