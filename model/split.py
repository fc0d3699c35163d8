"""A forward pass over prompts whose tokens are divided among the processes of a group.

Each process computes a contiguous block of the tokens of all chunks. In each layer it gathers what the others have made
of theirs, as encoded bytes, and stores the items and index keys of all tokens in its own cache. So attention and the
indexer need nothing of the others: they see the whole context of a process's tokens. Only the experts exchange
tokens (`model.shard.Exchange`).

Collectives need the same number of tokens in every process, so a process that has one token less than others computes
token 0 at position 0 beside its own. Nothing of that is stored, and no other token depends on it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBackend
from kernels.operands import IndexQueries
from model.config import ModelSpec
from model.network import Network
from model.passes import PassTokens, PrefillChunk, PrefillPass
from model.shard import Shard
from model.sparse_model import SparseModel

GatherRows = Callable[[torch.Tensor], torch.Tensor]
"""The rows of all processes, in their order, of the same number of rows of this one (`Exchange.gather`)."""


class SplitPass(PrefillPass):
    """Stores the tokens of all chunks, and attends for this process's block of them.

    tokens: those of the block, most_tokens with padding, on the device of the cache.
    """

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        spec: ModelSpec,
        backend: AttentionBackend,
        shard: Shard,
        gather: GatherRows,
        device: torch.device,
    ) -> None:
        super().__init__(chunks, spec, backend)
        self._gather = gather
        self._latent_dim = spec.latent_dim
        lengths = [len(chunk.token_ids) for chunk in chunks]
        own = [chunks[number].part(tokens) for number, tokens in shard.blocks(lengths)]
        self._block = PrefillPass(own, spec, backend)
        self._num_own = len(shard.tokens(sum(lengths)))
        width = shard.most_tokens(sum(lengths))
        padding = torch.zeros(width - self._num_own, dtype=torch.int64, device=device)
        parts = PassTokens.of(own, device) if own else (padding[:0],) * 3
        self.tokens = PassTokens(*(torch.cat((part, padding)) for part in parts))
        self._not_padding = _tokens_among_gathered(shard.world_size, sum(lengths), width, device)

    def store(self, layer: int, items: torch.Tensor) -> None:
        """See PrefillPass; items: of the block."""
        super().store(layer, self.of_all(items))

    def store_index_keys(self, layer: int, keys: torch.Tensor) -> None:
        """See PrefillPass; keys: of the block."""
        super().store_index_keys(layer, self.of_all(keys))

    def select(self, layer: int, index: IndexQueries | None) -> None:
        """See PrefillPass; of the block."""
        if index is not None and self._num_own:
            self._block.select(layer, index[: self._num_own])

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
        """See PrefillPass; of the block, where padding attends to nothing."""
        num_own, width = self._num_own, len(queries)
        if num_own == 0:
            return queries.new_zeros(width, queries.shape[1], self._latent_dim)
        attended = self._block.attend(layer, queries[:num_own], scaling)
        return attended if num_own == width else F.pad(attended, (0, 0, 0, 0, 0, width - num_own))

    def of_all(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all tokens, from those of the block."""
        gathered = self._gather(rows)
        return gathered if self._not_padding is None else gathered[self._not_padding]


class SplitModel(SparseModel):
    """A model of which this process prefills a block of each step's tokens. Every process of the group calls `prefill`
    with the same chunks, and with pages of the same numbers."""

    def __init__(
        self, network: Network, spec: ModelSpec, backend: AttentionBackend, shard: Shard, gather: GatherRows
    ) -> None:
        super().__init__(network, spec, backend)
        self._shard = shard
        self._gather_rows = gather

    @torch.no_grad()
    def prefill(
        self,
        chunks: Sequence[PrefillChunk],
        on_layer: Callable[[int], None] = lambda _: None,
        kv_only: bool = True,
    ) -> torch.Tensor:
        """Waits for the others in every layer. Hidden states are of all tokens, in every process."""
        split = SplitPass(chunks, self.spec, self._backend, self._shard, self._gather_rows, self.device)
        hidden = self._forward_prompts(split.tokens, split, on_layer, kv_only)
        return hidden if kv_only else split.of_all(hidden)


def _tokens_among_gathered(processes: int, count: int, width: int, device: torch.device) -> torch.Tensor | None:
    """Which gathered rows are tokens, int64 [count]; None if all are."""
    if count == processes * width:
        return None
    blocks = [len(Shard(rank, processes).tokens(count)) for rank in range(processes)]
    rows = [torch.arange(rank * width, rank * width + block) for rank, block in enumerate(blocks)]
    return torch.cat(rows).to(device)
