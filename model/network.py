"""The weights and modules of a sparse-attention network: DeepSeek-V3.2 or GLM-5."""

from dataclasses import dataclass

import torch

from model.attention import LatentAttention
from model.config import LayerKind, NetworkConfig
from model.experts import MixtureOfExperts
from model.feed_forward import FeedForward
from model.indexer import Indexer, IndexQueries
from model.linear import Linear
from model.norm import RmsNorm
from model.rope import Rope
from model.shard import WHOLE, Shard
from model.weights import Weights


@dataclass(frozen=True)
class Projected:
    """What a layer's attention makes of normed hidden states of N tokens.

    items: [N, item_dim], and index_keys, [N, index_dim], None without an indexer: to be cached. query_latents: normed,
    [N, query_rank].
    """

    items: torch.Tensor
    index_keys: torch.Tensor | None
    query_latents: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A decoder layer. down: the products of its normed input, one after the other: see `_down_parts`."""

    input_norm: RmsNorm
    down: Linear
    attention: LatentAttention
    indexer: Indexer | None
    mlp_norm: RmsNorm
    mlp: MixtureOfExperts | FeedForward

    @classmethod
    def load(cls, weights: Weights, number: int, config: NetworkConfig, shard: Shard) -> "Layer":
        """The layer of that number."""
        kind, hidden_size = config.layers[number], config.hidden_size
        name = f"model.layers.{number}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        return cls(
            input_norm=RmsNorm(weights.tensor(f"{name}.input_layernorm.weight", (hidden_size,)), config.norm_eps),
            down=weights.linear(_down_parts(attention, config, kind), hidden_size),
            attention=LatentAttention.load(weights, attention, config),
            indexer=Indexer.load(weights, f"{attention}.indexer", config) if kind.indexer else None,
            mlp_norm=RmsNorm(
                weights.tensor(f"{name}.post_attention_layernorm.weight", (hidden_size,)), config.norm_eps
            ),
            mlp=MixtureOfExperts.load(weights, mlp, config, shard)
            if kind.mixture
            else FeedForward.load(weights, mlp, hidden_size, config.dense_width),
        )

    def project(self, normed: torch.Tensor, rope: Rope) -> Projected:
        """What is cached of normed hidden states [N, hidden_size], and what queries are made from."""
        query_rank, item_dim = self.attention.query_norm.weight.numel(), self.attention.key_map.shape[2] + rope.dim
        query_latents, index_keys, compressed = self.down(normed).tensor_split(
            (query_rank, self.down.weight.shape[0] - item_dim), dim=-1
        )
        return Projected(
            items=self.attention.items(compressed, rope),
            index_keys=self.indexer.keys(index_keys, rope) if self.indexer else None,
            query_latents=self.attention.query_norm(query_latents),
        )

    def index_queries(self, normed: torch.Tensor, projected: Projected, rope: Rope) -> IndexQueries | None:
        """The queries of the layer's indexer, if it has one."""
        return self.indexer.queries(normed, projected.query_latents, rope) if self.indexer else None


@dataclass(frozen=True)
class Network:
    """All layers of a model, embedding and head. embedding, head: [vocab_size, hidden_size]."""

    config: NetworkConfig
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: torch.Tensor

    @classmethod
    def load(cls, weights: Weights, config: NetworkConfig, shard: Shard = WHOLE) -> "Network":
        """The part of the network that a process computes. Raises ValueError for a shard that is not possible."""
        vocabulary = config.vocab_size, config.hidden_size
        embedding = weights.tensor("model.embed_tokens.weight", vocabulary)
        return cls(
            config=config,
            embedding=embedding,
            layers=tuple(Layer.load(weights, number, config, shard) for number in range(len(config.layers))),
            norm=RmsNorm(weights.tensor("model.norm.weight", (config.hidden_size,)), config.norm_eps),
            head=embedding if config.tied_head else weights.tensor("lm_head.weight", vocabulary),
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
