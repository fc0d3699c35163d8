"""What computing and fetching take, learned from what they took."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from base.tombstones import LatestDict
from transfer.choices import Transport
from transfer.transports import TRANSPORTS

Floats = npt.NDArray[np.float64]

_FORGETS = 0.95
"""Factor of an observation's weight with each later observation."""
_HALF_LIFE_S = 300.0
"""Age at which an observation counts half: a link that was slow once is tried again."""
_PRIOR = 0.01
_FIRST_LATENCY_S = 0.01


class LinearCost:
    """Seconds as a sum of non-negative multiples of a few features, fitted to observations.

    Least squares of errors in proportion to size; the weight of an observation decays with those that follow and with
    time. Where observations do not tell the features apart, those with a small `ridge` explain them.
    """

    def __init__(
        self, sizes: Sequence[float], ridge: Sequence[float], prior: Sequence[tuple[Sequence[float], float]] = ()
    ) -> None:
        """sizes: what each feature adds to the size of an observation. ridge: of each feature, relative to its own
        weight. prior: observations whose weight never decays, and is a hundredth of others'."""
        self._sizes = np.array(sizes)
        self._ridge = np.array(ridge)
        size = len(ridge)
        self._prior = np.zeros((size, size)), np.zeros(size)
        self._seen = np.zeros((size, size)), np.zeros(size)
        self._seen_at = time.monotonic()
        for features, seconds in prior:
            row, target = self._row(features, seconds)
            self._prior[0][:] += _PRIOR * np.outer(row, row)
            self._prior[1][:] += _PRIOR * target * row

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn that something with these features took `seconds`."""
        row, target = self._row(features, seconds)
        products, sums = self._decayed()
        self._seen = _FORGETS * products + np.outer(row, row), _FORGETS * sums + target * row
        self._seen_at = time.monotonic()

    def estimate(self, features: Sequence[float]) -> float | None:
        """Seconds that something with these features would take; None if nothing is known."""
        products, sums = self._decayed()
        products, sums = products + self._prior[0], sums + self._prior[1]
        if not products.any():
            return None
        free = [i for i in range(len(sums)) if products[i, i] > 0]
        while free:
            scale = np.sqrt(products[free, free])
            normal = products[np.ix_(free, free)] / np.outer(scale, scale) + np.diag(self._ridge[free])
            found = np.linalg.solve(normal, sums[free] / scale) / scale
            if (found >= 0).all():
                return float(found @ np.array(features, dtype=float)[free])
            free.pop(int(np.argmin(found * scale)))
        return None

    def _row(self, features: Sequence[float], seconds: float) -> tuple[Floats, float]:
        values = np.array(features, dtype=float)
        size = float(values @ self._sizes)
        return values / size, seconds / size

    def _decayed(self) -> tuple[Floats, Floats]:
        factor = 0.5 ** ((time.monotonic() - self._seen_at) / _HALF_LIFE_S)
        return factor * self._seen[0], factor * self._seen[1]


class ComputeCost:
    """Seconds of forward passes: a sum of costs per pass, per token, and per token and position before it."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._model = LinearCost(sizes=(64.0, 1.0, 1 / 4096), ridge=(0.02, 1e-6, 0.002))

    def observe(self, ranges: Sequence[tuple[int, int]], seconds: float) -> None:
        """A pass has computed these positions, [start, stop) of several prompts."""
        self._model.observe((1.0, *_work(ranges)), seconds)

    def of_pass(self, start: int, stop: int) -> float | None:
        """Seconds of a pass over these positions of one prompt; None if unknown."""
        return self._model.estimate((1.0, *_work([(start, stop)])))

    def saved(self, start: int, stop: int, num_tokens: int) -> float | None:
        """Seconds by which [start, num_tokens) takes longer to compute than [stop, num_tokens); None if unknown."""
        passes = -(-(num_tokens - start) // self._chunk_size) + (stop - num_tokens) // self._chunk_size
        return self._model.estimate((float(passes), *_work([(start, stop)])))


class FetchCosts:
    """Seconds of fetches from each decode node, from the request to verified bytes."""

    def __init__(self) -> None:
        self._models: LatestDict[str, LinearCost] = LatestDict(256)

    def observe(self, boot_id: str, transport: Transport, num_bytes: int, seconds: float) -> None:
        """transport: how that decode node is reached, as far as is known."""
        self._model(boot_id, transport).observe((1.0, float(num_bytes)), seconds)

    def estimate(self, boot_id: str, transport: Transport, num_bytes: int) -> float:
        found = self._model(boot_id, transport).estimate((1.0, float(num_bytes)))
        assert found is not None, "there is a first guess"
        return found

    def _model(self, boot_id: str, transport: Transport) -> LinearCost:
        model = self._models.get(boot_id)
        if model is None:
            a_gigabyte = 1e9 / TRANSPORTS[transport].bytes_per_second
            prior = (((1.0, 0.0), _FIRST_LATENCY_S), ((1.0, 1e9), a_gigabyte))
            model = LinearCost(sizes=(1e5, 1.0), ridge=(1e-6, 1e-6), prior=prior)
        self._models[boot_id] = model
        return model


def _work(ranges: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Tokens, and the sum of their positions."""
    tokens = sum(stop - start for start, stop in ranges)
    return float(tokens), sum((stop - start) * (start + stop) / 2 for start, stop in ranges)
