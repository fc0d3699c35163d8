"""How the values of a sample are spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Percentiles:
    """Of a sample, interpolated linearly, in its unit. Of few values the outer ones are close to the extremes."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        return cls(*(float(value) for value in np.percentile(values, (50, 90, 99))))
