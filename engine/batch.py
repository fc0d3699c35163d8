"""The requests of one decode step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control.messages import Sampling
from hisparse.coordinator import StepPlaces


@dataclass(frozen=True)
class Batch:
    """One step's requests and what the device needs of each; entry i of every field is the same request.

    places: as `HiSparseCoordinator.begin_step` returned it. sampling: how each request draws its next token. uniforms:
    float64 [n] in [0, 1), the random number of each request's next token.
    """

    request_ids: tuple[str, ...]
    places: StepPlaces
    sampling: tuple[Sampling, ...]
    uniforms: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.request_ids)
