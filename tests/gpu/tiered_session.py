"""Requests computed in this process on a CUDA device, prompts in pages and decoding through the KV tiers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from control.messages import Sampling
from engine.runner import Batch, LaunchedStep, ModelRunner
from hisparse.config import HiSparseConfig
from hisparse.sizing import plan_sizes
from hisparse.swap_in import StagedKV
from hisparse.tiers import build_tiers
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.passes import PrefillChunk
from model.sparse_model import SparseModel

CUDA = torch.device("cuda", 0)
_PAGE_SIZE = 16
_CHUNK = 200
_PLENTY = 2**34
GREEDY = Sampling(temperature=0)


class TieredSession:
    """Prompts that are prefilled and staged at once, then decoded together, in recorded steps or kernel by kernel."""

    def __init__(
        self, model: SparseModel, prompts: Sequence[torch.Tensor], context_length: int, record: bool, verify: bool
    ) -> None:
        self._model = model
        self._prompts = [prompt.to(CUDA) for prompt in prompts]
        self.request_ids = [f"r{number}" for number in range(len(prompts))]
        top_k = model.spec.index_topk
        sizes = plan_sizes(
            HiSparseConfig(device_buffer_size=2 * top_k, top_k=top_k, host_to_device_ratio=None, host_pool_gib=0.1),
            model.spec.kv_layout,
            max_running_requests=len(prompts),
            context_length=context_length,
            index_page_size=_PAGE_SIZE,
            available_host_bytes=_PLENTY,
            available_device_bytes=_PLENTY,
        )
        self.coordinator = build_tiers(sizes, CUDA, verify)
        self.runner = ModelRunner(model, self.coordinator, len(prompts), context_length, record)

    def prefill(self) -> torch.Tensor:
        """Bring all prompts but their last tokens into the tiers, and decode these: logits [requests, vocab]."""
        for request_id, prompt in zip(self.request_ids, self._prompts, strict=True):
            self._prefill(request_id, prompt[:-1])
        return self.decode(range(len(self._prompts)), [int(prompt[-1]) for prompt in self._prompts])

    def decode(self, numbers: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Compute one token of each of these requests. Returns its logits, which the next step may overwrite."""
        for number, token_id in zip(numbers, token_ids, strict=True):
            self.runner.admit(self.request_ids[number], [token_id], [], GREEDY)
        step = self.launch(numbers)
        self.coordinator.step_over(step.batch.places, dict.fromkeys(step.batch.request_ids, 1))
        return step.logits

    def launch(self, numbers: Sequence[int], sampling: Sequence[Sampling] | None = None) -> LaunchedStep:
        """Queue the forward pass of a step of these requests, behind whatever is queued."""
        request_ids = tuple(self.request_ids[number] for number in numbers)
        assert not self.coordinator.append_tokens(request_ids)
        batch = Batch(
            request_ids=request_ids,
            places=self.coordinator.begin_step(request_ids),
            sampling=tuple(sampling or [GREEDY] * len(request_ids)),
        )
        return self.runner.launch(batch)

    def sample(self, step: LaunchedStep) -> None:
        """Queue the drawing of its tokens."""
        self.runner.sample(step, np.full((len(step.batch), 1), 0.5))
        self.runner.draft(step)

    def _prefill(self, request_id: str, tokens: torch.Tensor) -> None:
        length = len(tokens)
        slots = self.coordinator.host.allocate(length)
        assert slots is not None
        if length:
            pool = PagedKVPool(self._model.spec.kv_layout, -(-length // _PAGE_SIZE), _PAGE_SIZE, CUDA)
            pages = pool.allocate(length)
            assert pages is not None
            cache = PagedSequence(pool, pages)
            prompt = torch.cat((tokens, tokens[-1:]))
            for start in range(0, length, _CHUNK):
                self._model.prefill([PrefillChunk.of(prompt, start, min(start + _CHUNK, length), cache)])
            staged = StagedKV(list(pool.kv), list(pool.index_keys), cache.rows(0, length), lambda: None)
            self.coordinator.admit_request_into_staging(request_id, slots, staged, length)
            torch.cuda.synchronize()
            assert self.coordinator.staging.poll().landed == [request_id]
        assert self.coordinator.admit_request_direct(request_id, slots, length)


@contextmanager
def session(
    model: SparseModel,
    prompts: Sequence[torch.Tensor],
    context_length: int,
    record: bool = False,
    verify: bool = False,
) -> Iterator[TieredSession]:
    """A session whose requests leave nothing behind."""
    opened = TieredSession(model, prompts, context_length, record, verify)
    try:
        yield opened
        for request_id in opened.request_ids:
            opened.coordinator.release_host(opened.coordinator.retract_request(request_id))
        assert opened.coordinator.is_idle()
        assert opened.coordinator.counters().violations == 0
    finally:
        opened.coordinator.close()
