"""Decode steps as CUDA graphs: recorded at start for a ladder of batch and context sizes, then replayed."""

import time

import structlog
import torch

from base.errors import StartupError
from base.memory import human
from hisparse.coordinator import HiSparseCoordinator
from hisparse.step import DecodeStep
from model.sparse_model import SparseModel

log = structlog.get_logger(__name__)

_LEAST_TOKENS = 2048
"""Shorter contexts have no recording: scoring few tokens costs little."""
_CONTEXT_RATIO = 4
"""A sequence is scored over at most this many times its length."""


class StepGraphs:
    """Replays the smallest recorded step that has room for the batch and for its longest sequence.

    Everything that differs between steps is in the tensors that the step was recorded with; the graph looks up where
    tokens lie. Entries that a batch does not fill are padding. All graphs share one pool of memory, since only one runs
    at a time.
    """

    def __init__(
        self,
        model: SparseModel,
        coordinator: HiSparseCoordinator,
        next_tokens: torch.Tensor,
        rows: torch.Tensor,
        newest: torch.Tensor,
        context_length: int,
    ) -> None:
        """next_tokens: int64 [rows of the device tables], the token that each computes next. rows, newest: int64
        [largest batch], below 0 for padding. Raises StartupError if a step cannot be recorded."""
        self._model = model
        self._coordinator = coordinator
        self._next_tokens = next_tokens
        self._rows, self._newest = rows, newest
        self._logits = torch.empty(len(rows), model.spec.vocab_size, device=model.device)
        self._batches = batch_ladder(len(rows))
        self._contexts = context_ladder(context_length)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, DecodeStep]] = {}
        """By batch and context: a graph, and the step whose tensors it reads and writes."""
        free, _ = torch.cuda.mem_get_info(model.device)
        # The largest first: the others find their memory in what it leaves.
        for context in reversed(self._contexts):
            for batch in reversed(self._batches):
                self._record(batch, context)
        left, _ = torch.cuda.mem_get_info(model.device)
        log.info("sized", what=f"recorded decode steps: {len(self._recorded)}, {human(max(0, free - left))}")

    def replay(self, batch: int, longest: int) -> torch.Tensor:
        """Queue a step of `batch` requests, the longest of which has `longest` tokens, the newest included.

        Returns float32 logits [batch, vocab], which the next replay overwrites.
        """
        size = next(size for size in self._batches if batch <= size)
        context = next(size for size in self._contexts if longest <= size)
        graph, step = self._recorded[size, context]
        graph.replay()
        step.verify()
        return self._logits[:batch]

    def close(self) -> None:
        """Give the recorded steps back: NCCL does not disconnect while one that uses it is left."""
        for graph, _ in self._recorded.values():
            graph.reset()
        self._recorded.clear()

    @torch.inference_mode()
    def _record(self, batch: int, context: int) -> None:
        """Record a step of padding."""
        started = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        try:
            # Once without recording: a first use loads kernels, which is not possible while recording.
            self._compute(batch, context)
            # thread_local: other threads of the process may go on using the device.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step = self._compute(batch, context)
        except RuntimeError as error:
            raise StartupError(
                f"a decode step of {batch} requests and {context} tokens cannot be recorded as a CUDA graph "
                f"({str(error).splitlines()[0]}): give --disable-cuda-graph"
            ) from error
        self._recorded[batch, context] = graph, step
        log.info(
            "recorded a decode step",
            batch=batch,
            context=context,
            done=f"{len(self._recorded)}/{len(self._batches) * len(self._contexts)}",
            seconds=round(time.monotonic() - started, 2),
        )

    def _compute(self, batch: int, context: int) -> DecodeStep:
        rows, newest = self._rows[:batch], self._newest[:batch]
        step = self._coordinator.cache(rows, newest, context)
        token_ids = self._next_tokens[rows.clamp(min=0)]
        self._logits[:batch] = self._model.decode(token_ids, newest.clamp(min=0), step)
        step.finish()
        return step


def batch_ladder(largest: int) -> list[int]:
    """Powers of two up to the largest batch, and that one."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def context_ladder(longest: int) -> list[int]:
    """The longest context and fractions of it, for batches of short requests; ascending."""
    ladder = [longest]
    while ladder[0] >= _CONTEXT_RATIO * _LEAST_TOKENS:
        ladder.insert(0, -(-ladder[0] // _CONTEXT_RATIO))
    return ladder
