"""The prefill of a long prompt by a group of ranks, and by one rank that has all experts."""

import statistics
import time
from dataclasses import dataclass, replace

import torch

from benchmarks.decode.config import DecodeBench
from benchmarks.decode.workload import build_model
from benchmarks.device import finish, give_back_memory
from benchmarks.ranks.steps import of_rank
from engine.chunked import ChunkedPrefill, PrefillJob
from kvcache.paged_pool import PagedKVPool
from model.loader import choose_backend
from model.roofline import RankModel
from model.shard import Exchange
from model.sparse_model import SparseModel
from model.split import SplitModel
from ranks.group import RankGroup

_PAGE_SIZE = 64
_TIMED = 3


@dataclass(frozen=True)
class PromptTimes:
    """Seconds from the first chunk's launch until the KV of all tokens is in the pool: medians, of the slowest rank."""

    chunk: int
    group_s: float
    alone_s: float

    @property
    def ratio(self) -> float:
        """Of the group's time to that of one rank."""
        return self.group_s / self.alone_s


def time_prompt_of(
    group: RankGroup, exchange: Exchange, whole: RankModel, part: RankModel, tokens: int, chunk: int
) -> PromptTimes:
    """All ranks call it. whole: with all experts. part: with as many as a rank has."""
    spec, device = whole.spec, group.device
    backend = choose_backend("auto", device, spec)
    alone = _seconds(SparseModel(whole.network, spec, backend), tokens, chunk)
    network = of_rank(part.network, group.rank, exchange)
    together = _seconds(SplitModel(network, spec, backend, group.shard, exchange.gather), tokens, chunk, group)
    group_s, alone_s = (max(each) for each in zip(*group.share([together, alone]), strict=True))
    return PromptTimes(chunk, group_s, alone_s)


def models_of(config: DecodeBench, device: torch.device) -> tuple[RankModel, RankModel]:
    """The network with all experts, and with those of one of `config.rank_of` ranks."""
    return build_model(replace(config, rank_of=1), device), build_model(config, device)


def _seconds(model: SparseModel, tokens: int, chunk: int, group: RankGroup | None = None) -> float:
    """As a prefill node computes it: chunk by chunk, and the next is launched when one is there."""
    pool = PagedKVPool(model.spec.kv_layout, -(-tokens // _PAGE_SIZE), _PAGE_SIZE, model.device)
    prefill: ChunkedPrefill[PrefillJob] = ChunkedPrefill(pool, chunk)
    prompt = torch.randint(0, model.spec.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(1 + _TIMED):  # the first one compiles
        job = PrefillJob(prompt)
        prefill.add(job)
        prefill.start_waiting()
        finish(model.device)
        if group is not None:
            group.share(None)
        started = time.perf_counter()
        while (step := prefill.plan()) is not None:
            step.compute(model)
            finish(model.device)
            prefill.complete(step)
        times.append(time.perf_counter() - started)
        prefill.release(job)
    del pool, prefill, job, step
    give_back_memory()
    return statistics.median(times[1:])
