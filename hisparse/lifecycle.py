"""The states of a request in the KV tiers, and the moves between them."""

from enum import Enum


class TierState(Enum):
    """Where a request's KV is and who owns its host slots."""

    NEW = "new"
    """Unknown to the coordinator; the caller owns the host slots."""
    STAGING = "staging"
    """Its prompt is being copied from device pages to host slots; the coordinator owns both."""
    ABORTING = "aborting"
    """It was aborted, but the copy may still touch its pages and slots; the coordinator owns both until it is over."""
    RUNNING = "running"
    """It has a row and decodes; the coordinator owns its host slots."""
    GONE = "gone"
    """The coordinator holds nothing of it."""


class LifecycleError(RuntimeError):
    """A request was asked to do what its state does not allow."""


_MOVES = {
    TierState.NEW: {TierState.STAGING, TierState.RUNNING},
    TierState.STAGING: {TierState.ABORTING, TierState.GONE},
    TierState.ABORTING: {TierState.GONE},
    TierState.RUNNING: {TierState.GONE},
    TierState.GONE: set(),
}


def move(request_id: str, state: TierState, to: TierState) -> TierState:
    """The state `to`, if it may follow `state`. Raises LifecycleError otherwise."""
    if to not in _MOVES[state]:
        raise LifecycleError(f"request {request_id} is {state.value} and cannot become {to.value}")
    return to
