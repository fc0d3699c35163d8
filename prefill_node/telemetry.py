"""What operators see of the attempts at a prefill node: metrics, spans (`base.tracing`) and log lines."""

import time
from collections.abc import Sequence

import structlog

from base.metrics import Metrics
from engine.chunked import ChunkedPrefill, PrefillStep
from model.passes import PrefillChunk
from prefill_node.attempt import HeldAttempt, HeldState

log = structlog.get_logger(__name__)

_LABELS = sorted({state.label for state in HeldState} - {HeldState.ENDED.label})


def set_gauges(metrics: Metrics, prefill: ChunkedPrefill[HeldAttempt], held: Sequence[HeldAttempt]) -> None:
    """Bring the gauges of a prefill node up to date."""
    pool, free, cached = prefill.pool, prefill.pool.free_pages, prefill.pages.cached_pages
    used = max(0, pool.num_pages - free - cached)
    for state, pages in (("free", free), ("cached", cached), ("used", used)):
        metrics.prefill_pages.labels(state).set(pages)
    metrics.kv_usage.set(prefill.kv_usage)
    metrics.prompt_tokens_waiting.set(prefill.queued_tokens)
    labels = [attempt.state.label for attempt in held]
    for label in _LABELS:
        metrics.requests.labels(label).set(labels.count(label))


def record_chunk(
    attempt: HeldAttempt,
    chunk: PrefillChunk,
    step: PrefillStep[HeldAttempt],
    started_at: float,
    error: str | None,
    is_void: bool,
) -> None:
    """Its part of a forward pass that has ended. is_void: computed in vain, since the prefix before it did not come."""
    attempt.span.record(
        "chunk",
        started_at,
        attributes=lambda: {
            "start": chunk.start,
            "stop": chunk.stop,
            "void": is_void,
            "step_requests": len(step.chunks),
            "step_tokens": sum(each.stop - each.start for _, each in step.chunks),
        },
        error=error,
    )


def record_computed(attempt: HeldAttempt, metrics: Metrics) -> None:
    """All of it is computed."""
    metrics.prefix_cache_queries.labels("prefill").inc(attempt.num_tokens)
    metrics.prefix_cache_hits.labels("prefill").inc(attempt.cached)
    attempt.span.record(
        "compute",
        attempt.begun_at or attempt.computed_at,
        attempt.computed_at,
        lambda: {"tokens": attempt.num_tokens, "cached": attempt.cached, "fetched": attempt.fetched},
    )


def record_sent(attempt: HeldAttempt, metrics: Metrics) -> None:
    """All of it was written to its decode node. The first writes begin while it is computed."""
    begun = attempt.begun_at or attempt.computed_at
    after_compute = time.monotonic() - attempt.computed_at
    metrics.note_stages(
        attempt.num_tokens,
        prefill_queue=begun - attempt.arrived_at,
        prefill=attempt.computed_at - begun,
        transfer=after_compute,
    )
    say = log.info if attempt.lingering else log.debug
    say(
        "sent",
        cached=attempt.cached,
        fetched=attempt.fetched,
        bytes=attempt.num_bytes,
        descriptors=attempt.num_descriptors,
        seconds=round(attempt.seconds, 4),
        after_compute=round(after_compute, 4),
        lingering=attempt.lingering,
        **attempt.id.log_fields,
    )
    attempt.span.record(
        "transfer",
        attempt.written_from or attempt.computed_at,
        attributes=lambda: {
            "to": attempt.decode.address,
            "bytes": attempt.num_bytes,
            "descriptors": attempt.num_descriptors,
            "seconds": attempt.seconds,
            "lingering": attempt.lingering,
        },
    )
