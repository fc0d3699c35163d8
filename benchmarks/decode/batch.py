"""A batch of requests that a model decodes, as the flags of `bench decode` say."""

import random
import statistics
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.decode.config import DecodeBench
from benchmarks.decode.selections import Selections
from benchmarks.decode.timing import KernelTimes, StepTiming, per_step
from benchmarks.decode.workload import GivenSelection, Requests
from benchmarks.stepping import GREEDY, launch
from engine.draft_policy import DraftPolicy
from engine.runner import ModelRunner
from hisparse.device_pool import DeviceKVPool
from model.loader import choose_backend
from model.roofline import RankModel
from model.sparse_model import SparseModel

_STEPS_THAT_MISS_NOTHING = 64
"""Before those that are timed, where no buffer has to settle: as many tokens are selected in a run, as a text's newest
ones are, and top-k takes a microsecond longer for runs."""


class DecodingBatch:
    """Requests of `--context` tokens each, and the model that decodes them, by recorded steps on a CUDA device.

    A node that drafts verifies as many drafts as it makes, and all are right. Accepting fewer takes as long. Raises
    StartupError for a batch that `--pools-gib` does not hold.
    """

    def __init__(self, config: DecodeBench, model: RankModel, batch: int, device: torch.device) -> None:
        spec, drafts = model.spec, config.speculative_num_steps
        self.requests = Requests(
            spec,
            config.context,
            batch,
            None if config.resident else config.device_buffer_size,
            device,
            drafts,
            config.resident_rows,
            config.pool_bytes,
            config.max_running_requests or batch,
        )
        self.hot_size = config.device_buffer_size if config.resident else self.pool.device_buffer_size
        """Hot slots that a request has, or would have if not all KV were in HBM."""
        self._spec = spec
        self._resident = config.resident
        self._given = GivenSelection(choose_backend("auto", device, spec), spec, self.requests, 1 + drafts)
        self.runner = ModelRunner(
            SparseModel(model.network, spec, self._given),
            self.requests.coordinator,
            batch,
            spec.context_length,
            record=device.type == "cuda",
            policy=DraftPolicy(drafts),
        )
        self._random = random.Random(0)

    @property
    def pool(self) -> DeviceKVPool:
        return self.requests.coordinator.device

    @property
    def whole(self) -> int:
        """How many requests have all their KV in HBM."""
        return len(self.requests.ids) if self._resident else self.pool.resident_rows

    def time(self, selected: Selections, steps: int) -> StepTiming:
        """Take requests back to their context and time steps one after another, each from the call until the device has
        the logits. Nothing is sampled. The tokens are the same each time, and so are the experts that they choose."""
        filling = self._settle(selected)
        self._random.seed(0)
        coordinator, width = self.requests.coordinator, self.runner.policy.max_width
        first = coordinator.counters()
        times = [self._step_ms(selected) for _ in range(steps)]
        last = coordinator.counters()
        looked_up = steps * len(self.requests.ids) * width * coordinator.host.layout.num_index_layers
        return StepTiming(
            median_ms=statistics.median(times),
            p90_ms=statistics.quantiles(times, n=10)[-1],
            hits=(last.hits - first.hits) / looked_up,
            misses=(last.misses - first.misses) / looked_up,
            num_bytes=(last.bytes - first.bytes) / steps,
            ahead_bytes=(last.ahead_bytes - first.ahead_bytes) / steps,
            ahead_wait_ms=(last.ahead_wait_s - first.ahead_wait_s) / steps * 1e3,
            filling_ms=tuple(filling),
        )

    def profile(self, selected: Selections, steps: int) -> KernelTimes:
        """The same with the profiler, for the time of kernels.

        It leaves its library in the process, with which all later steps seem to take longer (pytorch 144455).
        """
        self._settle(selected)
        profilers = [profile(activities=[ProfilerActivity.CUDA]) for _ in range(steps)]
        for profiler in profilers:
            self._step_ms(selected, profiler)
        return per_step(profilers)

    def prepare(self, selected: Selections) -> None:
        """Make room for the tokens of the next step, and have it select this."""
        self.requests.make_room()
        positions = self._given.positions
        into = positions.view(len(positions), len(self.requests.ids), -1, positions.shape[2])
        selected.write(self.requests.newest, into)
        if self._resident:
            self.requests.to_slots(into)

    def close(self) -> None:
        self.requests.close()

    def _settle(self, selected: Selections) -> list[float]:
        """Begin again, until rows are resident and misses are what they always are. Returns the milliseconds of each
        step in which rows became resident."""
        self.requests.restart()
        selected.begin(self._spec.num_index_layers, len(self.requests.ids), self.pool.device)
        filling, idle = list[float](), 0 if self.requests.coordinator.residents.enabled else 2
        while idle < 2:  # a fill ends in one step, and the next one begins in the step after
            filling.append(self._step_ms(selected))
            idle = idle + 1 if self.requests.are_filled else 0
        misses_nothing = self.whole == len(self.requests.ids)
        for _ in range(_STEPS_THAT_MISS_NOTHING if misses_nothing else selected.settle()):
            self._step_ms(selected)
        return filling

    def _step_ms(self, selected: Selections, watched: AbstractContextManager[object] | None = None) -> float:
        """One step. What it selects and the room for its tokens are not in the time taken."""
        requests, runner, coordinator = self.requests, self.runner, self.requests.coordinator
        passes, width = runner.passes, runner.policy.max_width
        self.prepare(selected)
        for request_id in requests.ids:
            runner.admit(request_id, [self._random.randrange(self._spec.vocab_size)], [], GREEDY)
        passes.num_drafts.fill_(width - 1)
        rows = [coordinator.row(request_id) for request_id in requests.ids]
        right = passes.tokens[rows, :width].roll(-1, dims=1).flatten()  # after the drafts, any token
        torch.cuda.synchronize()
        coordinator.fill_rows()
        with watched or nullcontext():
            start = time.perf_counter()
            step = launch(runner, coordinator, requests.ids, width=width)
            if width > 1:
                passes.accept(len(requests.ids), width, right)
                step.drawn = right[:, None].double()
                runner.draft(step)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        coordinator.step_over(step.batch.places, dict.fromkeys(requests.ids, width))
        return elapsed * 1e3
