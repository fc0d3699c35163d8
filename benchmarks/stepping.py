"""Decode steps of a fixed set of requests, without a node around them."""

from collections.abc import Sequence

import numpy as np
import torch

from control.messages import Sampling
from engine.runner import Batch, LaunchedStep, ModelRunner
from hisparse.coordinator import HiSparseCoordinator

GREEDY = Sampling(temperature=0)


def launch(
    runner: ModelRunner,
    coordinator: HiSparseCoordinator,
    request_ids: Sequence[str],
    sampling: Sampling = GREEDY,
    width: int = 1,
) -> LaunchedStep:
    """Queue the forward pass of a step of these requests, which have room for it.

    sampling: of all of them, by default the likeliest token. width: tokens of each.
    """
    batch = Batch(
        request_ids=tuple(request_ids),
        places=coordinator.begin_step(request_ids, width),
        sampling=(sampling,) * len(request_ids),
    )
    return runner.launch(batch)


def sample(runner: ModelRunner, step: LaunchedStep, key: int = 0, masks: torch.Tensor | None = None) -> None:
    """Queue the drawing of a step's tokens, by the same random number, and the drafts after them."""
    runner.sample(step, np.full((len(step.batch), 2 * step.batch.places.width - 1), key), masks=masks)
    runner.draft(step)


def next_tokens(runner: ModelRunner, step: LaunchedStep, key: int = 0) -> list[int]:
    """Draw a step's tokens, as `sample` does, and wait for them. Raises RuntimeError where there is none."""
    sample(runner, step, key)
    collected = runner.collect(step)
    if missing := next((computed.failure for computed in collected if computed.failure is not None), None):
        raise RuntimeError(str(missing))
    return [token_id for computed in collected for token_id in computed.token_ids]
