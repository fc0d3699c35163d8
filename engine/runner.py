"""Computes decode steps: forward pass, sampling, and what goes to the device and comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import structlog
import torch

from base.device import Download, check_device, upload
from control.messages import Sampling, Token
from engine.adjustments import Ban, LogitAdjustments
from engine.draft_policy import DraftPolicy, StepSize
from engine.graphs import StepGraphs
from engine.passes import StepPasses
from engine.sampling import NoToken, SamplingNeeds, draw, settings_of, tokens_of
from hisparse.coordinator import HiSparseCoordinator, StepPlaces
from model.sparse_model import SparseModel

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Batch:
    """The requests of one step; entry i of every field is the same request.

    places: of `HiSparseCoordinator.begin_step`.
    """

    request_ids: tuple[str, ...]
    places: StepPlaces
    sampling: tuple[Sampling, ...]

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(eq=False)
class LaunchedStep:
    """A step whose first forward pass is queued.

    logits: float32 [batch * width, vocab], which the next step overwrites. padded: its size, padding included. drawn:
    what `draw` returned, once sampling is queued too. computed: the copy of tokens, their numbers and drafts to the
    host, once the second pass is queued.
    """

    batch: Batch
    logits: torch.Tensor
    padded: int
    drawn: torch.Tensor | None = None
    computed: Download | None = None

    @property
    def size(self) -> StepSize:
        """What decides how long it takes."""
        return StepSize(self.padded, self.batch.places.width)


class Computed(NamedTuple):
    """What a step gave a request: its next tokens, at most `width`, and drafts of those after them.

    There may be no token at all, if the step came to the end of what the request may get. failure: why no token follows
    these. reported: the same tokens, if the request reports log probabilities; most do not, and a step has hundreds.
    """

    token_ids: Sequence[int]
    width: int
    drafts: Sequence[int] = ()
    failure: NoToken | None = None
    reported: Sequence[Token] = ()


class ModelRunner:
    """Runs the steps of a decode node. Only `collect` waits for the device.

    A step takes four calls: `launch` queues its forward pass, `sample` the drawing of its tokens, `draft` the drafts of
    the tokens after them, `collect` waits for all of these. To keep the device busy: launch(n + 1), collect(n),
    sample(n + 1), draft(n + 1).

    Device state, by row: that of `StepPasses`, sampling settings, and what changes logits. A request that ended in step
    n is still in step n + 1; the device reuses its row only after that step.

    One thread uses it, with its device as the current one.
    """

    def __init__(
        self,
        model: SparseModel,
        coordinator: HiSparseCoordinator,
        max_running: int,
        context_length: int,
        record: bool,
        policy: DraftPolicy | None = None,
    ) -> None:
        """record: replay recorded steps (CUDA graphs). policy: which widths steps have; None for a model that does not
        draft. Raises StartupError where steps cannot be recorded."""
        device = model.device
        self._model = model
        self._coordinator = coordinator
        self.policy = policy or DraftPolicy(0)
        self.passes = StepPasses(model, coordinator, max_running, self.policy.max_width - 1)
        greedy = torch.tensor(settings_of(Sampling(temperature=0), model.spec.vocab_size), dtype=torch.float64)
        self._settings = greedy.repeat(max_running, 1).to(device)
        self._adjustments = LogitAdjustments(max_running, model.spec.vocab_size, device)
        self._graphs = StepGraphs(self.passes, max_running, context_length, self.policy.widths) if record else None
        self._queued = self._graphs or self.passes
        """Queues the passes of a step, recorded or kernel by kernel."""

    def close(self) -> None:
        """Give the recorded steps back. No step follows."""
        if self._graphs is not None:
            self._graphs.close()

    def admit(self, request_id: str, prompt_ids: Sequence[int], generated: Sequence[int], sampling: Sampling) -> None:
        """Set up the row of a request that was just admitted. The newest of its tokens is computed next."""
        row, passes = self._coordinator.row(request_id), self.passes
        upload([generated[-1] if generated else prompt_ids[-1]], passes.tokens[row, :1])
        upload([self._coordinator.num_tokens(request_id)], passes.positions[row : row + 1])
        passes.num_drafts[row] = 0
        passes.temperatures[row] = sampling.temperature
        upload(np.array(settings_of(sampling, self._model.spec.vocab_size)), self._settings[row])
        self._adjustments.admit(row, sampling, prompt_ids, generated)

    @torch.inference_mode()
    def launch(self, batch: Batch, padded: int | None = None) -> LaunchedStep:
        """Queue the forward pass of a step that the coordinator has begun.

        padded: size of the step, padding included; default: that of the batch.
        """
        places, padded = batch.places, padded or len(batch)
        self._upload(batch)
        self._queued.verify(padded, places.longest, places.width).verify()
        return LaunchedStep(batch, self.passes.logits[: len(batch) * places.width], padded)

    @torch.inference_mode()
    def pad(self, size: StepSize) -> None:
        """Queue the passes of a step of padding only, for a rank without requests."""
        self.passes.inputs.fill_(-1)
        self._queued.verify(size.batch, 1, size.width).verify()
        self._draft(size.batch, 1, size.width)

    @torch.inference_mode()
    def sample(
        self,
        step: LaunchedStep,
        keys: npt.NDArray[np.int64],
        bans: Sequence[Ban] = (),
        masks: torch.Tensor | None = None,
        ended: Sequence[int] = (),
    ) -> None:
        """Queue the drawing of a step's tokens, which are the input of each request's next step.

        keys: int64 [batch, 2 * width - 1], the random numbers of each request's next tokens; the last are those of
        drafts. bans: tokens that requests may not get now. masks: int32 [batch * width, ceil(vocab / 32)], see
        `engine.grammar.masks`, in pinned memory for a CUDA device; None: all tokens. They may change after `collect`.
        Entry b * width + j is of token j of request b. ended: requests, by index, that have left the coordinator since
        `launch`: they are padding from now on.
        """
        batch, width, passes = step.batch, step.batch.places.width, self.passes
        if ended and passes.drafts:
            self._upload(batch, ended)
        rows = passes.inputs[0, : len(batch)].clamp(min=0)
        drafts = passes.tokens[rows, 1:width]
        repeated = rows.repeat_interleave(width)
        whole = np.zeros((len(batch), passes.keys.shape[1]), dtype=np.int64)
        whole[:, : keys.shape[1]] = keys
        of_tokens = upload(whole, passes.keys[: len(batch)])[:, :width].flatten()
        needs = SamplingNeeds.of(batch.sampling)
        changed = self._adjustments.apply(step.logits, rows, bans, drafts) if needs.adjusted else step.logits
        drawn = draw(step.logits, self._settings[repeated].T, of_tokens, needs, changed, masks)
        final = passes.accept(len(batch), width, drawn[:, 0].long())
        if needs.adjusted:
            self._adjustments.count(repeated, final)
        step.drawn = drawn

    @torch.inference_mode()
    def draft(self, step: LaunchedStep) -> bool:
        """Queue the drafts of the tokens after those of a step, and the copy of its new KV to the host.

        False if the step was not sampled: then it only computes what other ranks of a group compute with it.
        """
        batch, width, passes = step.batch, step.batch.places.width, self.passes
        if step.drawn is None:
            # Its requests have ended.
            passes.inputs.fill_(-1)
        self._draft(step.padded, batch.places.longest, width)
        if step.drawn is None:
            return False
        rows = passes.inputs[0, : len(batch)].clamp(min=0)
        columns = step.drawn.view(len(batch), -1), passes.counts[: len(batch), None], passes.tokens[rows, 1:width]
        step.computed = Download(torch.cat([column.double() for column in columns], dim=1))
        return True

    def collect(self, step: LaunchedStep) -> list[Computed]:
        """Wait for the tokens of a sampled step, request by request."""
        assert step.computed is not None, "a step is collected after it was sampled"
        batch, width = step.batch, step.batch.places.width
        found = step.computed.wait()
        drawn, others = found[:, :-width].reshape(len(batch), width, -1), found[:, -width:].int().tolist()
        counts = [count for count, *_ in others]
        self._coordinator.step_over(batch.places, dict(zip(batch.request_ids, counts, strict=True)))
        computed = []
        for entry, (ids, (count, *drafts)) in enumerate(zip(drawn[:, :, 0].int().tolist(), others, strict=True)):
            # What is no token is the last of them.
            failure = NoToken(ids[count - 1]) if count and ids[count - 1] < 0 else None
            token_ids = ids[: count if failure is None else count - 1]
            sampling, reported = batch.sampling[entry], []
            if sampling.top_logprobs is not None:
                reported = tokens_of(drawn[entry, : len(token_ids)], [sampling] * len(token_ids))
            computed.append(Computed(token_ids, width, drafts, failure, cast("list[Token]", reported)))
        return computed

    def check_device(self) -> None:
        """After an error outside of a step: raise DeviceFailed if the device does not work any more."""
        check_device(self._model.device)

    def give_up(self, batch: Batch) -> None:
        """Wait for what was queued of a failed step, and count it as over. Raises DeviceFailed."""
        check_device(self._model.device)
        self._coordinator.step_over(batch.places)

    def _upload(self, batch: Batch, ended: Sequence[int] = ()) -> None:
        """Tell the device the rows of a step and where they end, and that all others are padding."""
        inputs = np.full(self.passes.inputs.shape, -1, dtype=np.int64)
        inputs[:, : len(batch)] = batch.places.rows, batch.places.ends
        inputs[:, list(ended)] = -1
        upload(inputs, self.passes.inputs)

    def _draft(self, batch: int, longest: int, width: int) -> None:
        if self.passes.drafts:
            self._queued.draft(batch, longest, width).verify()
