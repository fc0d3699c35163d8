"""Computes decode steps: forward pass, sampling, and what goes to the device and comes back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
import torch

from control.messages import Sampling, Token
from engine.adjustments import Ban, LogitAdjustments
from engine.device import Download, check_device
from engine.graphs import StepGraphs
from engine.sampling import NoToken, SamplingNeeds, Settings, draw, settings_of, tokens_of
from hisparse.coordinator import HiSparseCoordinator, StepPlaces
from hisparse.device_pool import upload
from model.sparse_model import SparseModel

log = structlog.get_logger(__name__)

_NO_TOKEN = 0
"""The token id of padding: any id that has an embedding."""


@dataclass(frozen=True)
class Batch:
    """The requests of one step; entry i of every field is the same request.

    places: of `HiSparseCoordinator.begin_step`. uniforms: float64 [n] in [0, 1), the random number of each next token.
    """

    request_ids: tuple[str, ...]
    places: StepPlaces
    sampling: tuple[Sampling, ...]
    uniforms: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(eq=False)
class LaunchedStep:
    """A step whose forward pass is queued. drawn: the copy of its tokens to the host, once sampling is queued too."""

    batch: Batch
    logits: torch.Tensor
    drawn: Download | None = None


class ModelRunner:
    """Runs the steps of a decode node. Only `collect` waits for the device.

    A step takes three calls: `launch` queues its forward pass, `sample` the drawing of its tokens, `collect` waits for
    the tokens. To keep the device busy: launch(n + 1), collect(n), sample(n + 1).

    Device state, by row: the token that is computed next, which sampling writes, sampling settings, and what changes
    logits. A request that ended in step n is still in step n + 1; the device reuses its row only after that step.

    One thread uses it, with its device as the current one.
    """

    def __init__(
        self,
        model: SparseModel,
        coordinator: HiSparseCoordinator,
        max_running: int,
        context_length: int,
        record: bool,
    ) -> None:
        """record: replay recorded steps (CUDA graphs). Raises StartupError where steps cannot be recorded."""
        device = model.device
        self._model = model
        self._coordinator = coordinator
        self._next_tokens = torch.full((max_running,), _NO_TOKEN, dtype=torch.int64, device=device)
        self._settings = torch.zeros((max_running, len(Settings._fields)), dtype=torch.float64, device=device)
        self._adjustments = LogitAdjustments(max_running, model.spec.vocab_size, device)
        self._inputs = torch.full((3, max_running), -1, dtype=torch.int64, device=device)
        """Rows, newest positions, and the bits of random numbers; -1 for padding."""
        self._graphs: StepGraphs | None = None
        if record:
            rows, newest, _ = self._inputs
            self._graphs = StepGraphs(model, coordinator, self._next_tokens, rows, newest, context_length)

    def close(self) -> None:
        """Give the recorded steps back. No step follows."""
        if self._graphs is not None:
            self._graphs.close()

    def admit(self, request_id: str, prompt_ids: Sequence[int], generated: Sequence[int], sampling: Sampling) -> None:
        """Set up the row of a request that was just admitted. The newest of its tokens is computed next."""
        row = self._coordinator.row(request_id)
        upload([generated[-1] if generated else prompt_ids[-1]], self._next_tokens[row : row + 1])
        upload(np.array(settings_of(sampling, self._model.spec.vocab_size)), self._settings[row])
        self._adjustments.admit(row, sampling, prompt_ids, generated)

    @torch.inference_mode()
    def launch(self, batch: Batch, padded: int | None = None) -> LaunchedStep:
        """Queue the forward pass of a step that the coordinator has begun, and the copy of its new KV to the host.

        padded: size of the step, padding included; default: that of the batch.
        """
        inputs = np.full(self._inputs.shape, -1, dtype=np.int64)
        inputs[:, : len(batch)] = batch.places.rows, batch.places.newest, batch.uniforms.view(np.int64)
        return LaunchedStep(batch, self._forward(inputs, padded or len(batch))[: len(batch)])

    @torch.inference_mode()
    def pad(self, padded: int) -> None:
        """Queue the forward pass of a step of padding only, for a rank without requests."""
        self._forward(np.full(self._inputs.shape, -1, dtype=np.int64), padded)

    def _forward(self, inputs: npt.NDArray[np.int64], size: int) -> torch.Tensor:
        """The logits of a step of `size` requests, padding included."""
        upload(inputs, self._inputs)
        longest = max(1, int(inputs[1].max()) + 1)
        if self._graphs is not None:
            return self._graphs.replay(size, longest)
        rows, newest = self._inputs[0, :size], self._inputs[1, :size]
        step = self._coordinator.cache(rows, newest, longest, lengths=tuple((inputs[1, :size] + 1).tolist()))
        logits = self._model.decode(self._next_tokens[rows.clamp(min=0)], newest.clamp(min=0), step)
        step.finish()
        step.verify()
        return logits

    @torch.inference_mode()
    def sample(self, step: LaunchedStep, bans: Sequence[Ban] = (), masks: torch.Tensor | None = None) -> None:
        """Queue the drawing of a step's tokens, which are the input of each request's next step.

        bans: tokens that requests may not get now. masks: of the batch, int32 [batch, ceil(vocab / 32)], see
        `engine.grammar.masks`, in pinned memory for a CUDA device; None: all tokens. They may change after `collect`.
        """
        rows, _, uniforms = self._inputs[:, : len(step.batch)]
        needs = SamplingNeeds.of(step.batch.sampling)
        changed = self._adjustments.apply(step.logits, rows, bans) if needs.adjusted else step.logits
        drawn = draw(step.logits, self._settings[rows].T, uniforms.view(torch.float64), needs, changed, masks)
        token_ids = drawn[:, 0].long()
        if needs.adjusted:
            self._adjustments.count(rows, token_ids)
        self._next_tokens[rows] = token_ids.clamp(min=_NO_TOKEN)
        step.drawn = Download(drawn)

    def collect(self, step: LaunchedStep) -> list[Token | NoToken]:
        """Wait for the tokens of a sampled step, request by request."""
        assert step.drawn is not None, "a step is collected after it was sampled"
        drawn = step.drawn.wait()
        self._coordinator.step_over(step.batch.places.number)
        return tokens_of(drawn, step.batch.sampling)

    def check_device(self) -> None:
        """After an error outside of a step: raise DeviceFailed if the device does not work any more."""
        check_device(self._model.device)

    def give_up(self, batch: Batch) -> None:
        """Wait for what was queued of a failed step, and count it as over. Raises DeviceFailed."""
        check_device(self._model.device)
        self._coordinator.step_over(batch.places.number)
