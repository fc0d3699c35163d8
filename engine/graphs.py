"""Decode steps as CUDA graphs: recorded at start for a ladder of sizes, replayed for the requests of the moment."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from base.errors import StartupError
from base.memory import human
from hisparse.coordinator import HiSparseCoordinator
from hisparse.step import DecodeStep
from model.sparse_model import SparseModel

log = structlog.get_logger(__name__)

_LEAST_TOKENS = 2048
"""Contexts below this are not told apart: scoring them costs little."""
_CONTEXT_RATIO = 4
"""A sequence is scored over at most this many times its length."""
_NO_TOKEN = 0
"""Any id that has an embedding: what is computed for padding means nothing."""


@dataclass(frozen=True)
class _Recorded:
    """A graph and the step that it carries out, whose tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    step: DecodeStep


class GraphDecoding:
    """Replays the smallest recorded step that has room for the batch and for its longest sequence.

    A replay launches in one go what a step launches from Python kernel by kernel. All that differs from one step to the
    next is in `_inputs` (token ids, rows, newest positions); where tokens lie is looked up by the graph itself. Entries
    that a batch does not fill are padding, for which no kernel stores, selects or copies anything.

    The graphs share one pool of memory, since only one is replayed at a time, and leave their result in `_logits`.
    """

    def __init__(
        self, model: SparseModel, coordinator: HiSparseCoordinator, max_batch: int, context_length: int
    ) -> None:
        device = model.device
        self._model = model
        self._coordinator = coordinator
        self._batches = batch_ladder(max_batch)
        self._contexts = context_ladder(context_length)
        self._inputs = torch.full((3, max_batch), -1, dtype=torch.int64, device=device)
        self._inputs[0] = _NO_TOKEN
        self._logits = torch.empty(max_batch, model.spec.vocab_size, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        free, _ = torch.cuda.mem_get_info(device)
        with model.recordable():
            # The largest first: the others find their memory in what it leaves.
            for context in reversed(self._contexts):
                for batch in reversed(self._batches):
                    self._record(batch, context)
        left, _ = torch.cuda.mem_get_info(device)
        log.info("sized", what=f"recorded decode steps: {len(self._recorded)}, {human(max(0, free - left))}")

    def step(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> torch.Tensor:
        """See Decoding."""
        places = self._coordinator.place(request_ids)
        inputs = np.full(self._inputs.shape, -1, dtype=np.int64)
        inputs[0] = _NO_TOKEN
        inputs[:, : len(places)] = token_ids, [place.row for place in places], [place.newest for place in places]
        self._inputs.copy_(self._coordinator.device.upload(inputs))
        batch = next(size for size in self._batches if len(places) <= size)
        longest = max(place.newest for place in places) + 1
        context = next(size for size in self._contexts if longest <= size)
        recorded = self._recorded[batch, context]
        recorded.graph.replay()
        self._coordinator.finish_replay(recorded.step, request_ids)
        return self._logits[: len(places)]

    @torch.inference_mode()
    def _record(self, batch: int, context: int) -> None:
        """Record a step of padding. Raises StartupError where the device or the model does not let it be recorded."""
        started = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        try:
            # Once without recording: what is loaded or chosen at a first use must be there by then.
            self._compute(batch, context)
            # Other threads of the process may go on to use the device as they like.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step = self._compute(batch, context)
        except RuntimeError as error:
            raise StartupError(
                f"a decode step of {batch} requests and {context} tokens cannot be recorded as a CUDA graph "
                f"({str(error).splitlines()[0]}): give --disable-cuda-graph"
            ) from error
        self._recorded[batch, context] = _Recorded(graph, step)
        log.info(
            "recorded a decode step",
            batch=batch,
            context=context,
            done=f"{len(self._recorded)}/{len(self._batches) * len(self._contexts)}",
            seconds=round(time.monotonic() - started, 2),
        )

    def _compute(self, batch: int, context: int) -> DecodeStep:
        token_ids, rows, newest = self._inputs[:, :batch].unbind(0)
        step = self._coordinator.begin_recorded_step(rows, newest, context)
        self._logits[:batch] = self._model.decode(token_ids, newest.clamp(min=0), step)
        self._coordinator.finish_step(step)
        return step


def batch_ladder(largest: int) -> list[int]:
    """Powers of two up to the largest batch, and that one."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def context_ladder(longest: int) -> list[int]:
    """The longest context, and fractions of it for those whose requests are all short; ascending."""
    ladder = [longest]
    while ladder[0] >= _CONTEXT_RATIO * _LEAST_TOKENS:
        ladder.insert(0, -(-ladder[0] // _CONTEXT_RATIO))
    return ladder
