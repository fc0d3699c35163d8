"""What the spans of a decode node say of a request (`base.tracing`). The names of `gen_ai` are vLLM's."""

import time

from base.tracing import AttributeValue
from control.messages import FinishReason, PrefillDone
from decode_node.attempt import PrefillAttempt
from decode_node.request import Request, RequestState
from hisparse.swap_in import SwapInCounters

_Said = dict[str, AttributeValue | None]
_PREFILL = (RequestState.PREFILLING, RequestState.LOCAL_PREFILL, RequestState.STAGING)


def asked(attempt: PrefillAttempt) -> _Said:
    return {
        "node": attempt.node.address,
        "attempt": attempt.id.epoch,
        "tokens": attempt.num_tokens,
        "cached": len(attempt.prefix),
    }


def landed(done: PrefillDone) -> _Said:
    """The KV of an attempt has landed. node_cached: tokens that the prefill node did not compute."""
    return {
        "bytes": done.transferred_bytes,
        "transfer_seconds": done.transfer_seconds,
        "node_cached": done.cached_tokens,
        "lingering": done.lingering,
    }


def decoded(request: Request, now: SwapInCounters) -> _Said:
    """A request gives its device slots up. What was swapped in is counted for all requests that ran meanwhile."""
    before = now if request.swapped is None else request.swapped
    return {
        "tokens": len(request.generated),
        "retractions": request.retractions,
        "drafts": request.drafted,
        "accepted_drafts": request.accepted,
        "node_hits": now.hits - before.hits,
        "node_misses": now.misses - before.misses,
        "node_swapped_bytes": now.bytes - before.bytes,
    }


def end(request: Request, reason: FinishReason, error: str | None) -> None:
    now = time.monotonic()
    request.span.note(lambda: _ended(request, reason, now))
    request.span.fail(error)
    request.span.end(now)


def _ended(request: Request, reason: FinishReason, now: float) -> _Said:
    sampling, spent = request.generate.sampling, request.spent
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.generate.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": len(request.generate.prompt_ids),
        "gen_ai.usage.completion_tokens": len(request.generated),
        "gen_ai.latency.time_in_queue": spent[RequestState.WAITING],
        "gen_ai.latency.time_in_model_prefill": sum(spent[state] for state in _PREFILL),
        "gen_ai.latency.time_in_model_decode": spent[RequestState.RUNNING],
        "gen_ai.latency.e2e": now - request.arrived,
        "cached_tokens": request.cached_tokens,
        "resumed_at": request.resumed_at,
        "retractions": request.retractions,
        "prefill_attempts": request.epoch,
        "prefilled_by": request.prefilled_by,
        "reason": reason,
    }
