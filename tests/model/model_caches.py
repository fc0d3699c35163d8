"""The simplest caches that the model can run against: shuffled pages for a prompt, everything resident for decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.operands import PagedKeys
from model.config import ModelSpec
from model.passes import PrefillChunk
from model.sparse_model import SparseModel
from tests.greedy import likeliest


class PagedPool:
    """KV and index keys of all requests, in pages that are handed out in a shuffled order.

    Rows that nothing was written to hold NaN, which spreads to the logits if any of them is used.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int, seed: int = 0) -> None:
        rows = num_pages * page_size
        self.page_size = page_size
        nothing = 0xFF  # NaN in every format
        kv_format = spec.kv_format
        self.kv = torch.full((spec.num_layers, rows, kv_format.item_bytes), nothing, dtype=torch.uint8)
        self.keys = torch.full((spec.num_index_layers, rows, kv_format.index_key_bytes), nothing, dtype=torch.uint8)
        self._free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def allocate(self, length: int) -> torch.Tensor:
        return torch.tensor([self._free.pop() for _ in range(-(-length // self.page_size))])


class PagedRequest:
    """A `PrefillCache`: one request's pages."""

    def __init__(self, pool: PagedPool, capacity: int) -> None:
        self.pool = pool
        self.pages = pool.allocate(capacity)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        return self.pages[positions // self.pool.page_size] * self.pool.page_size + positions % self.pool.page_size

    def kv(self, layer: int) -> torch.Tensor:
        return self.pool.kv[layer]

    def index_keys(self, index_layer: int) -> torch.Tensor:
        return self.pool.keys[index_layer]


class ResidentBatch:
    """A `DecodeCache` in which every position is resident, on the pages that the prompt was written to.

    requests, positions: of the tokens that are stored. picked: the numbers of those that attend; by default all.
    """

    def __init__(
        self,
        pool: PagedPool,
        requests: Sequence[PagedRequest],
        positions: Sequence[int],
        picked: Sequence[int] | None = None,
    ) -> None:
        self._pool = pool
        self._newest = torch.cat([r.rows(p, p + 1) for r, p in zip(requests, positions, strict=True)])
        chosen = range(len(requests)) if picked is None else picked
        requests = [requests[number] for number in chosen]
        self._lengths = [positions[number] + 1 for number in chosen]
        longest = max(len(request.pages) for request in requests)
        self._page_table = torch.zeros((len(requests), longest), dtype=torch.int64)
        for row, request in enumerate(requests):
            self._page_table[row, : len(request.pages)] = request.pages

    def append(self, layer: int, items: torch.Tensor) -> None:
        self._pool.kv[layer][self._newest] = items

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        self._pool.keys[index_layer][self._newest] = keys

    def index_pages(self, index_layer: int) -> PagedKeys:
        keys = self._pool.keys[index_layer].view(-1, self._pool.page_size, self._pool.keys.shape[-1])
        return PagedKeys(keys, self._page_table, torch.tensor(self._lengths), self._lengths)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        assert (positions < torch.tensor(self._lengths).unsqueeze(1)).all()
        size = self._pool.page_size
        chosen = positions.clamp(min=0)
        rows = self._page_table.gather(1, chosen // size) * size + chosen % size
        return torch.where(positions < 0, -1, rows)

    def kv(self, layer: int) -> torch.Tensor:
        return self._pool.kv[layer]


class Session:
    """Requests that run on one model and one pool, for as long as `capacity` tokens each."""

    def __init__(
        self, model: SparseModel, prompts: Sequence[torch.Tensor], new_tokens: int, page_size: int = 16
    ) -> None:
        self.model = model
        self.prompts = prompts
        capacities = [len(prompt) + new_tokens for prompt in prompts]
        num_pages = sum(-(-capacity // page_size) for capacity in capacities) + 3
        self.pool = PagedPool(model.spec, num_pages, page_size)
        self.requests = [PagedRequest(self.pool, capacity) for capacity in capacities]

    def chunk(self, request: int, start: int, stop: int) -> PrefillChunk:
        return PrefillChunk.of(self.prompts[request], start, stop, self.requests[request])

    def prefill(self, chunk_size: int) -> torch.Tensor:
        """Run all prompts but their last tokens, a chunk of each per call, and then these; returns their logits."""
        for start in range(0, max(map(len, self.prompts)) - 1, chunk_size):
            running = [i for i, prompt in enumerate(self.prompts) if start < len(prompt) - 1]
            self.model.prefill(
                [self.chunk(i, start, min(start + chunk_size, len(self.prompts[i]) - 1)) for i in running]
            )
        return self.decode(torch.stack([prompt[-1] for prompt in self.prompts]), -1)

    def decode(self, token_ids: torch.Tensor, step: int, requests: Sequence[int] | None = None) -> torch.Tensor:
        """Run generated token number `step` of each request, or of these; number -1 is the prompt's last."""
        chosen = range(len(self.prompts)) if requests is None else requests
        positions = [len(self.prompts[request]) + step for request in chosen]
        cache = ResidentBatch(self.pool, [self.requests[request] for request in chosen], positions)
        return self.model.logits(self.model.decode(token_ids, torch.tensor(positions), cache))

    def generate(self, new_tokens: int, chunk_size: int) -> list[list[int]]:
        """Greedy continuations of all prompts."""
        tokens = self.prefill(chunk_size).argmax(dim=-1)
        output = [tokens]
        for step in range(new_tokens - 1):
            tokens = self.decode(tokens, step).argmax(dim=-1)
            output.append(tokens)
        return [list(row) for row in torch.stack(output, dim=1).tolist()]


def random_tokens(seed: int, *lengths: int) -> list[torch.Tensor]:
    """A prompt of each of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def assert_likeliest(
    reference: Any, session: Session, new_tokens: int, chunk_size: int, cache: Callable[[], Any] = lambda: None
) -> None:
    """A session's whole answers have, token for token, what the reference finds likeliest."""
    for prompt, answer in zip(session.prompts, session.generate(new_tokens, chunk_size), strict=True):
        assert len(answer) == new_tokens
        assert answer == likeliest(reference, prompt.tolist(), answer, cache())
