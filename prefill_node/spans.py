"""Spans of an attempt at a prefill node (`base.tracing`)."""

from base.tracing import AttributeValue
from engine.chunked import PrefillStep
from model.passes import PrefillChunk
from prefill_node.attempt import HeldAttempt


def record_chunk(
    attempt: HeldAttempt,
    chunk: PrefillChunk,
    step: PrefillStep[HeldAttempt],
    started_at: float,
    error: str | None,
    is_void: bool,
) -> None:
    """Its part of a forward pass that has ended. is_void: computed in vain, since the prefix before it did not come."""

    def said() -> dict[str, AttributeValue | None]:
        return {
            "start": chunk.start,
            "stop": chunk.stop,
            "void": is_void,
            "step_requests": len(step.chunks),
            "step_tokens": sum(each.stop - each.start for _, each in step.chunks),
        }

    attempt.span.record("chunk", started_at, attributes=said, error=error)


def record_compute(attempt: HeldAttempt) -> None:
    """All of it is computed."""
    attempt.span.record(
        "compute",
        attempt.begun_at or attempt.computed_at,
        attempt.computed_at,
        lambda: {"tokens": attempt.num_tokens, "cached": attempt.cached, "fetched": attempt.fetched},
    )


def record_transfer(attempt: HeldAttempt) -> None:
    """All of it was written to its decode node. The first writes begin while it is computed."""
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
