"""A prompt in a paged pool of which one chunk is computed, as a prefill node computes it."""

import torch

from benchmarks.decode.workload import fill_pool
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.loader import choose_backend
from model.passes import PrefillChunk
from model.roofline import RankModel
from model.shard import Exchange
from model.sparse_model import SparseModel

_PAGE_SIZE = 64


class Prompt:
    """A prompt of `context` tokens whose last `chunk` tokens are computed; before them are random items and keys.

    The chunk may be computed any number of times: each time it stores the same KV again.
    """

    def __init__(self, model: RankModel, context: int, chunk: int, device: torch.device) -> None:
        spec = model.spec
        self.pool = PagedKVPool(spec.kv_layout, -(-context // _PAGE_SIZE), _PAGE_SIZE, device)
        fill_pool(self.pool.kv, self.pool.index_keys, spec, device)
        backend = choose_backend("auto", device, spec)
        self._model = SparseModel(model.network, spec, backend)
        pages = self.pool.allocate(context)
        assert pages is not None, "the pool has pages for the whole prompt"
        prompt = torch.randint(0, spec.vocab_size, (context + 1,), generator=torch.Generator().manual_seed(0))
        self._chunk = PrefillChunk.of(prompt, context - chunk, context, PagedSequence(self.pool, pages))

    @torch.inference_mode()
    def compute(self) -> None:
        """Queue the forward pass of the chunk."""
        self._model.prefill([self._chunk])


class MarkedExchange(Exchange):
    """Tells when experts begin and end: what they compute lies between gathering and reducing."""

    def __init__(self, inner: Exchange, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = self._inner.gather(rows)
        mark(self._device)
        return gathered

    def own(self, count: int) -> range:
        return self._inner.own(count)

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        mark(self._device)
        return self._inner.reduce(parts)


MARK = "spin_kernel"
"""The name of the kernel that marks: nothing else launches it."""


def mark(device: torch.device) -> None:
    """Launch a kernel of a microsecond, to be found again among those that the profiler lists."""
    if device.type == "cuda":
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
