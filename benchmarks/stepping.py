"""Decode steps of a fixed set of requests, and tiers for one, without a node around them."""

from collections.abc import Sequence

import numpy as np
import torch

from control.messages import Sampling
from engine.runner import Batch, LaunchedStep, ModelRunner
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.sizing import plan_sizes
from hisparse.tiers import build_tiers
from kvcache.layout import KVLayout

GREEDY = Sampling(temperature=0)


_PLENTY = 1 << 40
INDEX_PAGE = 64


def tiers_of_one(
    config: HiSparseConfig, layout: KVLayout, context_length: int, device: torch.device, shareable: bool = False
) -> HiSparseCoordinator:
    """The tiers of a decode node that runs one request at a time, whatever memory there is."""
    sizes = plan_sizes(
        config,
        layout,
        max_running_requests=1,
        context_length=context_length,
        index_page_size=INDEX_PAGE,
        available_host_bytes=_PLENTY,
        available_device_bytes=_PLENTY,
    )
    return build_tiers(sizes, device, shareable=shareable)


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
