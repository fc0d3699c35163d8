"""A decode step of a rank, with the others and without them: the same weights, the same requests."""

import random
import statistics
import time
from dataclasses import dataclass, replace

from benchmarks.decode.workload import Requests
from benchmarks.device import finish, give_back_memory
from benchmarks.stepping import GREEDY, launch
from engine.runner import ModelRunner
from model.feed_forward import MixtureOfExperts
from model.loader import choose_backend
from model.network import Network
from model.roofline import RankModel, work_of_step
from model.shard import Exchange
from model.sparse_model import SparseModel
from ranks.group import RankGroup

_WARM_UP = 5
_STEPS = 30


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step with so many requests at each rank: of the group, of a rank whose group is copies of its
    own tokens (`bench decode --rank-of`), and what the hardware takes at least. mixtures: layers of the model that have
    experts."""

    batch: int
    group_ms: float
    alone_ms: float
    limit_ms: float
    mixtures: int

    @property
    def us_per_mixture(self) -> float:
        """What the group costs in each layer that has experts."""
        return (self.group_ms - self.alone_ms) * 1e3 / self.mixtures


def time_steps_of(group: RankGroup, exchange: Exchange, model: RankModel, context: int, batch: int) -> StepTimes:
    """All ranks call it. Medians; the slowest rank's. model: with its exchange of copies, of the first rank."""
    spec, device = model.spec, group.device
    requests = Requests(spec, context, batch, spec.context_length, device)
    backend = choose_backend("auto", device, spec)
    networks = {"group": of_rank(model.network, group.rank, exchange), "alone": model.network}
    runners = {
        name: ModelRunner(
            SparseModel(network, spec, backend),
            requests.coordinator,
            batch,
            spec.context_length,
            record=device.type == "cuda",
        )
        for name, network in networks.items()
    }
    rng = random.Random(group.rank)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(_WARM_UP + _STEPS):
        for name, runner in runners.items():
            requests.make_room()
            for request_id in requests.ids:
                runner.admit(request_id, [rng.randrange(spec.vocab_size)], [], GREEDY)
            finish(device)
            group.barrier.wait(batch)
            started = time.perf_counter()
            step = launch(runner, requests.coordinator, requests.ids)
            finish(device)
            times[name].append((time.perf_counter() - started) * 1e3)
            requests.coordinator.step_over(step.batch.places, dict.fromkeys(requests.ids, 1))
    medians = [statistics.median(times[name][_WARM_UP:]) for name in ("group", "alone")]
    group_ms, alone_ms = (max(each) for each in zip(*group.share(medians), strict=True))
    works = work_of_step(model, batch, context, 0, batch * group.world_size)
    mixtures = sum(isinstance(layer.mlp, MixtureOfExperts) for layer in model.network.layers)
    requests.close()
    del runners, requests
    give_back_memory()
    limit_ms = sum(work.ms(1.0) for part in works.values() for work in part)
    return StepTimes(batch, group_ms, alone_ms, limit_ms, mixtures)


def of_rank(network: Network, rank: int, exchange: Exchange) -> Network:
    """The network with the experts of a rank, whose random weights are as good as others, and its exchange."""
    layers = []
    for layer in network.layers:
        mlp = layer.mlp
        if isinstance(mlp, MixtureOfExperts):
            layer = replace(layer, mlp=replace(mlp, first=rank * mlp.number, exchange=exchange))
        layers.append(layer)
    return replace(network, layers=tuple(layers))
