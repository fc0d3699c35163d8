"""Decode steps of a fixed set of requests, without a node around them."""

from collections.abc import Sequence

import numpy as np

from control.messages import Sampling
from engine.batch import Batch
from engine.runner import LaunchedStep, ModelRunner
from hisparse.coordinator import HiSparseCoordinator

GREEDY = Sampling(temperature=0)


def launch(runner: ModelRunner, coordinator: HiSparseCoordinator, request_ids: Sequence[str]) -> LaunchedStep:
    """Queue the forward pass of a step of these requests, which have room for it and take the likeliest tokens."""
    batch = Batch(
        request_ids=tuple(request_ids),
        places=coordinator.begin_step(request_ids),
        sampling=(GREEDY,) * len(request_ids),
        uniforms=np.zeros(len(request_ids)),
    )
    return runner.launch(batch)


def next_tokens(runner: ModelRunner, step: LaunchedStep) -> list[int]:
    """Draw a step's tokens and wait for them. Raises RuntimeError where there is none."""
    runner.sample(step)
    tokens = [-1 if token is None else token.token_id for token in runner.collect(step)]
    if min(tokens) < 0:
        raise RuntimeError("the model's logits are not finite numbers")
    return tokens
