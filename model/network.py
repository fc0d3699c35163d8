"""The weights and modules of a sparse-attention network: DeepSeek-V3.2 or GLM-5."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.operands import Activations, RmsNorm, Rope
from kernels.ops import ops_for
from model.attention import Indexer, LatentAttention
from model.config import NetworkConfig
from model.families import DRAFT_LAYER, LayerKind
from model.feed_forward import FeedForward, MixtureOfExperts
from model.shard import NO_EXCHANGE, SINGLE_RANK, Exchange, Shard
from model.weights import Linear, Weights


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    down: the products of its normed input, one after the other: see `_down_parts`. query_b: queries of normed latents.
    """

    input_norm: RmsNorm
    down: Linear
    query_b: Linear
    attention: LatentAttention
    indexer: Indexer | None
    mlp_norm: RmsNorm
    mlp: MixtureOfExperts | FeedForward

    @classmethod
    def load(cls, weights: Weights, number: int, config: NetworkConfig, shard: Shard, exchange: Exchange) -> "Layer":
        """The layer of that number. The first one after `config.layers` is that of the draft layer."""
        kind, hidden_size = (*config.layers, DRAFT_LAYER)[number], config.hidden_size
        name = f"model.layers.{number}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return cls(
            input_norm=RmsNorm(weights.tensor(f"{name}.input_layernorm.weight", (hidden_size,)), config.norm_eps),
            down=weights.linear(_down_parts(attention, config, kind), hidden_size),
            query_b=weights.linear(
                {f"{attention}.q_b_proj": config.heads * (config.nope_dim + config.rope_dim)}, config.query_rank
            ),
            attention=LatentAttention.load(weights, attention, config),
            indexer=Indexer.load(weights, f"{attention}.indexer", config) if kind.indexer else None,
            mlp_norm=RmsNorm(
                weights.tensor(f"{name}.post_attention_layernorm.weight", (hidden_size,)), config.norm_eps
            ),
            mlp=MixtureOfExperts.load(weights, mlp, config, shard, exchange)
            if kind.mixture
            else FeedForward.load(weights, mlp, hidden_size, config.dense_width),
        )

    def project(self, normed: Activations, rope: Rope) -> tuple[torch.Tensor, ...]:
        """Latents of queries, index keys, and compressed keys and values, of normed hidden states [N, hidden_size].

        [N, query_rank], [N, index_dim], of no width where the layer has no indexer, and [N, latent_dim + rope_dim]: all
        before their norms and rotations.
        """
        query_rank, latent_dim = self.attention.query_norm.weight.numel(), self.attention.latent_norm.weight.numel()
        compressed_at = self.down.weight.shape[0] - latent_dim - rope.dim
        return self.down(normed).tensor_split((query_rank, compressed_at), dim=-1)

    def norm_query_latents(self, latents: torch.Tensor) -> Activations:
        """What `query_b` and the indexer make queries of, of latents [N, query_rank]."""
        return ops_for(latents).add_rms_norm(latents, None, self.attention.query_norm, self.query_b.fp8)[1]


@dataclass(frozen=True)
class DraftLayer:
    """The multi-token prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2), which drafts a token.

    projection: [hidden_size, 2 * hidden_size], of the next token's normed embedding, then the normed hidden state. The
    embedding and the head are those of the network.
    """

    embed_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: torch.Tensor
    layer: Layer
    norm: RmsNorm

    @classmethod
    def load(cls, weights: Weights, config: NetworkConfig, shard: Shard, exchange: Exchange) -> "DraftLayer":
        """The layer after `config.layers`. Its projection is in no published checkpoint in block-fp8."""
        number, size = len(config.layers), config.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.tensor(f"model.layers.{number}.{name}.weight", (size,)), config.norm_eps)

        return cls(
            embed_norm=norm("enorm"),
            hidden_norm=norm("hnorm"),
            projection=weights.tensor(f"model.layers.{number}.eh_proj.weight", (size, 2 * size)),
            layer=Layer.load(weights, number, config, shard, exchange),
            norm=norm("shared_head.norm"),
        )

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input, of the next tokens' embeddings and the hidden states after the final norm, all [N,
        hidden_size]."""
        return F.linear(torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1), self.projection)


@dataclass(frozen=True)
class Network:
    """All layers of a model, embedding and head. embedding, head: [vocab_size, hidden_size]. draft: None if the process
    does not draft."""

    config: NetworkConfig
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: torch.Tensor
    draft: DraftLayer | None

    @classmethod
    def load(
        cls,
        weights: Weights,
        config: NetworkConfig,
        shard: Shard = SINGLE_RANK,
        exchange: Exchange = NO_EXCHANGE,
        drafts: bool = False,
    ) -> "Network":
        """The part of the network that a process computes. Raises ValueError for a shard that is not possible."""
        vocabulary = config.vocab_size, config.hidden_size
        embedding = weights.tensor("model.embed_tokens.weight", vocabulary)
        return cls(
            config=config,
            embedding=embedding,
            layers=tuple(Layer.load(weights, number, config, shard, exchange) for number in range(len(config.layers))),
            norm=RmsNorm(weights.tensor("model.norm.weight", (config.hidden_size,)), config.norm_eps),
            head=embedding if config.tied_head else weights.tensor("lm_head.weight", vocabulary),
            draft=DraftLayer.load(weights, config, shard, exchange) if drafts else None,
        )


def _down_parts(name: str, config: NetworkConfig, kind: LayerKind) -> dict[str, int]:
    """Projections of the layer's normed input: queries' latents, index keys, and compressed keys and values.

    The last one is that whose rows are no multiple of 128 in published checkpoints.
    """
    index = {f"{name}.indexer.wk": config.index_dim} if kind.indexer else {}
    return {
        f"{name}.q_a_proj": config.query_rank,
        **index,
        f"{name}.kv_a_proj_with_mqa": config.latent_dim + config.rope_dim,
    }
