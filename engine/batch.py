"""The requests of one decode step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control.messages import Sampling
from engine.sampling import SamplingNeeds
from hisparse.coordinator import StepPlaces


@dataclass(frozen=True)
class Batch:
    """One step's requests and what the device needs of each; entry i of everything is the same request.

    Built by the scheduler and never changed. places: as `HiSparseCoordinator.begin_step` returned it. sampling: how
    each draws its next token. uniforms: float64 [n] in [0, 1), the random number of each one's next token.
    """

    request_ids: tuple[str, ...]
    places: StepPlaces
    sampling: tuple[Sampling, ...]
    uniforms: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def needs(self) -> SamplingNeeds:
        """What sampling the whole batch takes."""
        return SamplingNeeds.of(self.sampling)
