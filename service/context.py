"""The context of a node: what is asked for, or else the longest one that its pools have room for."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import structlog

from base.errors import StartupError
from model.config import ModelSpec

log = structlog.get_logger(__name__)

Plan = TypeVar("Plan")

_SHORTEST = 2
"""A prompt's token and its answer's."""


def fit_context(spec: ModelSpec, asked: int | None, plan: Callable[[ModelSpec], Plan]) -> tuple[ModelSpec, Plan]:
    """The plan of the node's pools, and the specification that it is for.

    plan: pools for the context of a specification. Raises StartupError if they do not fit; a longer context takes more.
    Raises what `plan` raises for the context that was asked for, or for the model's own if not even the shortest fits.
    """
    try:
        return spec, plan(spec)
    except StartupError as error:
        if asked is not None:
            raise
        reason = error

    def fails(context_length: int) -> bool:
        try:
            plan(replace(spec, context_length=context_length))
        except StartupError:
            return True
        return False

    longest = bisect_left(range(spec.context_length), True, lo=_SHORTEST, key=fails) - 1
    if longest < _SHORTEST:
        raise reason
    log.warning("the context is shorter than the model's", tokens=longest, model=spec.context_length, why=str(reason))
    fitting = replace(spec, context_length=longest)
    return fitting, plan(fitting)
