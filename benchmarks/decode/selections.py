"""What the requests of `bench decode` are made to select."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch

from base.errors import StartupError
from benchmarks.swap_in.eviction import load_trace
from benchmarks.swap_in.published import StackSelections
from benchmarks.swap_in.workload import Rotation, Shape, turns

_RECORDED = "recorded:"
_SETTLING_STEPS = 40
"""After which reference bits are what they always are."""


class Selections(ABC):
    """Of all tokens of a batch, in each index layer. name: in reports. new_positions: what each token misses; None if
    the hot buffer decides."""

    name: str
    new_positions: int | None = None

    @abstractmethod
    def begin(self, index_layers: int, batch: int, device: torch.device) -> None:
        """Begin with requests whose buffers are empty."""

    @abstractmethod
    def settle(self) -> int:
        """Have the next steps bring buffers to where misses are what they always are. Returns how many steps do."""

    @abstractmethod
    def write(self, newest: int, into: torch.Tensor) -> None:
        """Write what the next step selects to int64 [index_layers, batch, queries, k]. The first query is at position
        `newest`, in the first step at the number of the context's tokens. All drafts of the steps before were right."""


class NewPositions(Selections):
    """So many that are new for each token, and others that never change: the same in all index layers."""

    def __init__(self, shape: Shape, count: int) -> None:
        self.name, self.new_positions = str(count), count
        self._shape = shape
        turns(shape, count)  # refuses what cannot be selected

    def begin(self, index_layers: int, batch: int, device: torch.device) -> None:
        assert self.new_positions is not None
        self._rotation = Rotation(self._shape, batch, self.new_positions)
        self._tokens = cycle(self._rotation.positions)

    def settle(self) -> int:
        return self._rotation.length

    def write(self, newest: int, into: torch.Tensor) -> None:
        for query in range(into.shape[2]):
            into[:, :, query] = next(self._tokens)


class PublishedSelections(Selections):
    """Those of `benchmarks.swap_in.published`, of another sequence in each request and index layer."""

    name = "published"

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        StackSelections(1, shape.top_k, shape.context)  # refuses what is too short

    def begin(self, index_layers: int, batch: int, device: torch.device) -> None:
        top_k, context = self._shape.top_k, self._shape.context
        self._layers = [
            StackSelections(batch, top_k, context, seed=layer, device=device) for layer in range(index_layers)
        ]
        self._histories: list[Iterator[torch.Tensor]] = [iter(())] * index_layers

    def settle(self) -> int:
        hot_size = self._shape.hot_size
        self._histories = [selections.history(hot_size) for selections in self._layers]
        return -(-hot_size // self._shape.top_k) + _SETTLING_STEPS

    def write(self, newest: int, into: torch.Tensor) -> None:
        for layer, selections, history in zip(into, self._layers, self._histories, strict=True):
            if (past := next(history, None)) is not None:
                layer[:] = past[:, None]
                continue
            for query in range(into.shape[2]):
                layer[:, query] = selections.next(newest + query)


class RecordedSelections(Selections):
    """A trace of `benchmarks.swap_in.record`; every request and index layer begins at another step of it.

    Where its top-k is a part of the model's, each of its positions stands for several, far from each other. num_steps:
    after those in which the buffer settles. More steps, as before `settle`, begin again.
    """

    def __init__(self, shape: Shape, path: Path, num_steps: int, queries: int) -> None:
        trace, first = load_trace(path)
        self.name = f"{path.parent.name}/{path.stem}"
        steps, k = trace.shape
        self._reach, self._each = first + steps, shape.top_k // k
        self._steps = _SETTLING_STEPS + num_steps
        num_tokens = self._steps * queries
        self._last_start = steps - num_tokens
        fits = self._each * k == shape.top_k and self._each * self._reach <= shape.context
        if not fits or self._last_start < 0 or trace.min() < 0:
            raise StartupError(
                f"{path} has {steps} tokens that select {k} of up to {self._reach} positions each: expected a "
                f"divisor of {shape.top_k} in each step, at least {num_tokens} tokens, and a --context of at least "
                f"{max(1, self._each) * self._reach}"
            )
        self._trace = torch.from_numpy(trace)

    def begin(self, index_layers: int, batch: int, device: torch.device) -> None:
        self._step = 0
        self._trace = self._trace.to(device)
        starts = torch.randint(self._last_start + 1, (index_layers, batch), generator=torch.Generator().manual_seed(0))
        self._start = starts.to(device)
        self._apart = torch.arange(self._each, device=device) * self._reach

    def settle(self) -> int:
        self._step = 0
        return _SETTLING_STEPS

    def write(self, newest: int, into: torch.Tensor) -> None:
        queries = into.shape[2]
        first = self._start + self._step % self._steps * queries
        self._step += 1
        for query in range(queries):
            recorded = self._trace[first + query, :, None]
            into[:, :, query] = (recorded + self._apart).flatten(2)


def read_selections(word: str, shape: Shape, num_steps: int, queries: int) -> Selections:
    """What a word of `--selections` names. num_steps: after those in which the buffer settles.

    Raises StartupError for what cannot be selected.
    """
    if word == PublishedSelections.name:
        return PublishedSelections(shape)
    if word.startswith(_RECORDED):
        return RecordedSelections(shape, Path(word.removeprefix(_RECORDED)), num_steps, queries)
    raise StartupError(f"--selections {word}: expected {PublishedSelections.name} or {_RECORDED}FILE")
