"""Decode steps of a fixed set of requests, without a node around them."""

from collections.abc import Sequence

import numpy as np

from control.messages import Sampling, Token
from engine.runner import Batch, LaunchedStep, ModelRunner
from engine.sampling import NoToken
from hisparse.coordinator import HiSparseCoordinator

GREEDY = Sampling(temperature=0)


def launch(
    runner: ModelRunner,
    coordinator: HiSparseCoordinator,
    request_ids: Sequence[str],
    sampling: Sampling = GREEDY,
    uniform: float = 0.0,
) -> LaunchedStep:
    """Queue the forward pass of a step of these requests, which have room for it.

    sampling: of all of them, by default the likeliest token. uniform: the random number from 0 to 1 that draws theirs.
    """
    batch = Batch(
        request_ids=tuple(request_ids),
        places=coordinator.begin_step(request_ids),
        sampling=(sampling,) * len(request_ids),
        uniforms=np.full(len(request_ids), uniform),
    )
    return runner.launch(batch)


def next_tokens(runner: ModelRunner, step: LaunchedStep) -> list[int]:
    """Draw a step's tokens and wait for them. Raises RuntimeError where there is none."""
    runner.sample(step)
    collected = runner.collect(step)
    if missing := next((token for token in collected if isinstance(token, NoToken)), None):
        raise RuntimeError(str(missing))
    return [token.token_id for token in collected if isinstance(token, Token)]
