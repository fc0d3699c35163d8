"""The operations of a model that have several implementations, and the interface of attention backends.

`kernels.torch_ops` (plain torch, in transformers' order) and `kernels.triton` (bfloat16 on CUDA) have the functions of
`Ops`; `kernels.dispatch` chooses between the two.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from kernels.fp8_kv import Fp8Layout
from kernels.operands import (
    Activations,
    BlockFp8,
    IndexQueries,
    LayerNorm,
    PagedKeys,
    Pair,
    PartialSums,
    RmsNorm,
    Rope,
    RouterConfig,
    SwiGluWeights,
    Threshold,
)


class Ops(Protocol):
    """All implementations compute the same up to rounding. Launches depend on shapes alone, but where torch waits."""

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        norm: RmsNorm,
        fp8: BlockFp8 | None = None,
        room: Pair | None = None,
    ) -> tuple[torch.Tensor, Activations]:
        """hidden + addend, rounded, and the norm of that, all [N, dim]; no addend stands for zeros.

        addend: [N, dim], or float32 [parts, N, dim], whose sum over the parts is rounded and added. fp8: the norm is
        quantised, too. room: where values [N, dim] in contiguous rows and scales [N, ceil(dim / 128)] of any strides
        are written; None: new tensors.
        """

    def rotate(
        self, x: torch.Tensor, beside: torch.Tensor, rope: Rope, *, interleaved: bool, beside_first: bool
    ) -> torch.Tensor:
        """Rotate x, [N, heads, rope_dim], and concatenate it with `beside`, [N, heads, any width], unrotated.

        The members of a pair are neighbours in x (interleaved), or half its width apart (half-split). In the result all
        first members come before all second members.
        """

    def absorb(
        self, query_nope: torch.Tensor, query_rope: torch.Tensor, key_map: torch.Tensor, rope: Rope
    ) -> torch.Tensor:
        """Absorbed queries [N, heads, latent_dim + rope_dim]: the products with key_map, then the rotated part.

        query_nope: [N, heads, nope_dim]. query_rope: [N, heads, rope_dim]. key_map: [heads, nope_dim, latent_dim].
        """

    def float32_product(self, x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> PartialSums:
        """`scale` times x, [N, K], times the transpose of a weight of few rows, [M, K], in float32.

        weight: contiguous, of the type of x or float32.
        """

    def choose_experts(
        self, logits: PartialSums, bias: torch.Tensor, rule: RouterConfig, room: Pair | None = None
    ) -> Pair:
        """Weights, float32, and ids, int64, of the chosen experts, both [N, top_k], of logits [N, experts].

        bias: float32 [experts], added to the scores for the choice and not for the weights. room: where both are
        written, ids in int32 or int64; None: new tensors.
        """

    def experts(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        is_part: bool,
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts, whose weights are in the dtype of hidden, [N, hidden_size].

        ids, weights: [N, top_k], ids counted from the first expert here. gate_up: [E, 2 * width, hidden_size]. down:
        [E, hidden_size, width]. is_part: ids may name experts that are not here, which contribute nothing.
        """

    def quantise(self, x: torch.Tensor, power_of_two: bool) -> Pair:
        """`kernels.fp8.quantise_activations` of x [N, K] in contiguous rows; scales have strides (1, N)."""

    def linear_fp8(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Quantised activations [N, K] times the transpose of a weight in block-fp8 [M, K].

        bfloat16 [N, M], or float32 [parts, N, M] (split-K), which `reduce_fp8` or `add_rms_norm` adds up.
        """

    def reduce_fp8(self, parts: torch.Tensor) -> torch.Tensor:
        """What `linear_fp8` returned, added up in order and rounded: bfloat16 [N, M]."""

    def mlp_fp8(self, x: torch.Tensor, x_scales: torch.Tensor, weights: SwiGluWeights) -> torch.Tensor:
        """down(silu(gate(x)) * up(x)) of quantised activations [N, H], by weights [2 * W, H] and [H, W]."""

    def experts_fp8(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: SwiGluWeights,
        shared: range | None = None,
    ) -> torch.Tensor:
        """`kernels.fp8.experts` of quantised activations [N, H]: bfloat16 [N, H]."""

    def find_threshold(
        self, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, candidates: int = ...
    ) -> Threshold:
        """The threshold that keeps each row's top_k likeliest tokens, and of those the fewest that make up top_p.

        scaled: float32 [n, vocab], logits over temperature, less their maximum. top_k, top_p: float64 [n, 1], at least
        1 and above 0. The likeliest token always stays; top_p counts the probabilities that top_k leaves. candidates:
        how many of the likeliest tokens are looked at first; all are where these do not decide.
        """


class KVCodec(ABC):
    """What the bytes of items and index keys mean, for attention: see `kvcache.format`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What nodes compare before KV passes between them."""

    @property
    def fp8_layout(self) -> Fp8Layout | None:
        """The layout of the bytes for kernels that read fp8; None: vectors of one type, which `items` is a view of."""
        return None

    @abstractmethod
    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        """items: [N, item_dim] as the network computes them. Returns uint8 [N, item_bytes]."""

    @abstractmethod
    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """keys: [N, index_dim] as the network computes them. Returns uint8 [N, index_key_bytes]."""

    @abstractmethod
    def items(self, stored: torch.Tensor) -> torch.Tensor:
        """What attention reads, in a floating-point type of the format's choice.

        stored: uint8 [..., item_bytes]. Returns [..., item_dim].
        """

    @abstractmethod
    def items_at(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`items` of some rows. stored: uint8 [num_rows, item_bytes]. rows: int64. Returns [*rows.shape, item_dim]."""

    @abstractmethod
    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        """What the indexer reads: keys that are to be multiplied by `index_queries`.

        stored: uint8 [..., index_key_bytes]. Returns [..., index_dim] in a floating-point type of the format's choice.
        """

    def index_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Index queries [..., index_dim] in the coordinates in which index keys are stored."""
        return queries


class AttentionBackend(Protocol):
    """The part of sparse attention that depends on how KV is stored. Stateless and deterministic."""

    name: str

    def encode_items(self, compressed: torch.Tensor, norm: RmsNorm, rope: Rope) -> torch.Tensor:
        """Items as pools store them, uint8 [N, item_bytes].

        compressed: [N, latent_dim + rope_dim], what `kv_a_proj_with_mqa` computes. norm: of the latent.
        """

    def encode_index_keys(
        self, projected: torch.Tensor, norm: LayerNorm, rope: Rope, interleaved: bool
    ) -> torch.Tensor:
        """Index keys as pools store them, uint8 [N, index_key_bytes].

        projected: [N, index_dim], what `wk` computes. interleaved: see `Ops.rotate`.
        """

    def attend_rows(
        self, queries: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, scaling: float, latent_dim: int
    ) -> torch.Tensor:
        """Attend each query to its own rows of a pool.

        queries: [N, heads, item_dim]. kv: uint8 [num_rows, item_bytes]. rows: int64 [N, k], -1 where there is none. The
        first row of a query exists, unless it has no rows at all; then its result is finite and meaningless. Returns
        the attended latents, [N, heads, latent_dim], in the dtype of the queries.
        """

    def select_for_prompt(
        self, index: IndexQueries, keys: torch.Tensor, start: int, sequence_length: int, topk: int
    ) -> torch.Tensor:
        """Select for the T queries at positions [start, start + T) of a prompt.

        keys: uint8 [start + T, index_key_bytes], of all positions so far. Returns int64 positions [T, k] in any order,
        where k is at least min(topk, start + T) and at most topk; -1 where a query has fewer positions before it.
        """

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        """Select for one query of each request of a batch, over the request's whole sequence.

        Returns int64 positions [batch, k] in any order, where k is at least min(topk, longest sequence) and 1, and at
        most topk; -1 where a sequence is shorter. Where `pages.lengths` is None nothing waits for the device.
        """
