"""Decode steps as CUDA graphs: recorded at start for a ladder of batch and context sizes, then replayed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from base.errors import StartupError
from base.memory import human
from engine.passes import StepPasses
from hisparse.step import DecodeStep

log = structlog.get_logger(__name__)

_LEAST_TOKENS = 2048
"""Shorter contexts have no recording: scoring few tokens costs little."""
_CONTEXT_RATIO = 4
"""A sequence is scored over at most this many times its length."""


class _Size(NamedTuple):
    """The sizes that a step is recorded for: requests, tokens of the longest sequence, and tokens of each request."""

    batch: int
    context: int
    width: int


@dataclass(frozen=True)
class _Recording:
    """A graph, and the step whose tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    step: DecodeStep


class StepGraphs:
    """Replays the smallest recorded passes that have room for the batch and for its longest sequence.

    Everything that differs between steps is in the tensors of `StepPasses`; the graph looks up where tokens lie.
    Entries that a batch does not fill are padding. All graphs share one pool of memory, since only one runs at a time.
    """

    def __init__(
        self,
        passes: StepPasses,
        max_running: int,
        context_length: int,
        widths: Callable[[int], tuple[int, ...]],
    ) -> None:
        """widths: of steps, by the size of the batch. Raises StartupError if a pass cannot be recorded."""
        self._passes = passes
        self._batches = batch_ladder(max_running)
        self._contexts = context_ladder(context_length)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[_Size, tuple[_Recording, ...]] = {}
        device = passes.model.device
        free, _ = torch.cuda.mem_get_info(device)
        # The largest first: the others find their memory in what it leaves.
        sizes = [
            _Size(batch, context, width)
            for context in reversed(self._contexts)
            for batch in reversed(self._batches)
            for width in reversed(widths(batch))
        ]
        for size in sizes:
            self._record(size, of=len(sizes))
        left, _ = torch.cuda.mem_get_info(device)
        log.info("sized", what=f"recorded decode steps: {len(self._recorded)}, {human(max(0, free - left))}")

    def verify(self, batch: int, longest: int, width: int) -> DecodeStep:
        """`StepPasses.verify` of `batch` requests, the longest of which may come to have `longest` tokens."""
        return self._replay(0, batch, longest, width)

    def draft(self, batch: int, longest: int, width: int) -> DecodeStep:
        """`StepPasses.draft` of the step that `verify` began with the same arguments."""
        return self._replay(1, batch, longest, width)

    def close(self) -> None:
        """Give the recorded steps back: NCCL does not disconnect while one that uses it is left."""
        for recordings in self._recorded.values():
            for recording in recordings:
                recording.graph.reset()
        self._recorded.clear()

    def _replay(self, number: int, batch: int, longest: int, width: int) -> DecodeStep:
        size = next(size for size in self._batches if batch <= size)
        context = next(size for size in self._contexts if longest <= size)
        recording = self._recorded[_Size(size, context, width)][number]
        recording.graph.replay()
        return recording.step

    @torch.inference_mode()
    def _record(self, size: _Size, of: int) -> None:
        """Record the passes of a step of padding."""
        started = time.monotonic()
        passes = self._passes
        try:
            recordings = [self._recording(lambda: passes.verify(*size))]
            if passes.drafts:
                recordings.append(self._recording(lambda: passes.draft(*size)))
        except RuntimeError as error:
            raise StartupError(
                f"a decode step of {size.batch} requests and {size.context} tokens cannot be recorded as a CUDA graph "
                f"({str(error).splitlines()[0]}): give --disable-cuda-graph"
            ) from error
        self._recorded[size] = tuple(recordings)
        log.info(
            "recorded a decode step",
            batch=size.batch,
            context=size.context,
            done=f"{len(self._recorded)}/{of}",
            seconds=round(time.monotonic() - started, 2),
        )

    def _recording(self, queue: Callable[[], DecodeStep]) -> _Recording:
        # Once without recording: a first use loads kernels, which is not possible while recording.
        queue()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may go on using the device.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step = queue()
        return _Recording(graph, step)


def batch_ladder(largest: int) -> list[int]:
    """Powers of two up to the largest batch, and that one."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def context_ladder(longest: int) -> list[int]:
    """The longest context and fractions of it, for batches of short requests; ascending."""
    ladder = [longest]
    while ladder[0] >= _CONTEXT_RATIO * _LEAST_TOKENS:
        ladder.insert(0, -(-ladder[0] // _CONTEXT_RATIO))
    return ladder
