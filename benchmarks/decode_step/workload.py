"""A synthetic model with DeepSeek-V3.2's attention shapes, requests that it decodes, and what it is made to select."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig

from benchmarks.wrapped_backend import WrappedBackend
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.sizing import plan_sizes
from hisparse.tiers import build_tiers
from model.backends.protocol import AttentionBackend
from model.cache import PagedKeys
from model.config import network_config
from model.indexer import IndexQueries
from model.network import Network
from model.spec import ModelSpec
from model.weights import RandomWeights

GIB = 2**30
_INDEX_PAGE = 64
_FILL_ROWS = 1 << 16


@dataclass(frozen=True)
class Shape:
    """Attention as in DeepSeek-V3.2, but 16 heads, as one of eight devices has; the rest is small.

    context: tokens of each request at its admission. max_steps: tokens that it may get after that.
    """

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    q_rank: int = 1536
    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 2048
    intermediate: int = 4096
    vocab: int = 4096
    context: int = 32000
    max_steps: int = 512

    @property
    def context_length(self) -> int:
        return self.context + self.max_steps


def model_spec(shape: Shape) -> ModelSpec:
    """What the tiers and the model's passes need to know of the network."""
    return ModelSpec(
        model_type="deepseek_v32",
        num_layers=shape.layers,
        index_layer_of=tuple(range(shape.layers)),
        item_dim=shape.latent_dim + shape.rope_dim,
        latent_dim=shape.latent_dim,
        index_dim=shape.index_dim,
        index_topk=shape.top_k,
        vocab_size=shape.vocab,
        context_length=shape.context_length,
        dtype=torch.bfloat16,
        fingerprint="synthetic",
    )


def build_network(shape: Shape, device: torch.device) -> Network:
    """A network with random bfloat16 weights, and a dense feed-forward in every layer."""
    config = AutoConfig.for_model(
        "deepseek_v32",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        kv_lora_rank=shape.latent_dim,
        q_lora_rank=shape.q_rank,
        qk_nope_head_dim=shape.nope_dim,
        qk_rope_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
        index_topk=shape.top_k,
        index_n_heads=shape.index_heads,
        index_head_dim=shape.index_dim,
        max_position_embeddings=shape.context_length,
        mlp_layer_types=["dense"] * shape.layers,
        tie_word_embeddings=False,
    )
    return Network.load(RandomWeights(device, torch.bfloat16), network_config(config))


class GivenSelection(WrappedBackend):
    """Selects as another backend does, for what it costs, and then answers what it was given.

    Hidden states of random weights drift as no text does, and so would what they select: the miss rate would say
    nothing. `positions`, int64 [batch, topk] on the device, are what every layer is told to have selected; replays of
    a recorded step read what was last written to it.
    """

    def __init__(self, inner: AttentionBackend, batch: int, topk: int, device: torch.device) -> None:
        super().__init__(inner)
        self.positions = torch.zeros((batch, topk), dtype=torch.int64, device=device)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        batch, k = super().select_for_decode(index, pages, topk).shape
        return self.positions[:batch, :k].contiguous()


class Requests:
    """A batch of running requests of `shape.context` tokens each, admitted from a host pool of random items and keys.

    device_buffer_size: hot slots of each; with at least `shape.context_length` of them nothing is ever missed, and
    admission brings all KV into HBM.
    """

    def __init__(self, shape: Shape, batch: int, device_buffer_size: int, device: torch.device) -> None:
        layout = model_spec(shape).kv_layout
        host_slots = batch * shape.context_length
        self.sizes = plan_sizes(
            HiSparseConfig(
                device_buffer_size=device_buffer_size,
                top_k=shape.top_k,
                host_to_device_ratio=None,
                host_pool_gib=(host_slots + 1) * layout.token_bytes / GIB,
            ),
            layout,
            max_running_requests=batch,
            context_length=shape.context_length,
            index_page_size=_INDEX_PAGE,
            available_host_bytes=2**40,
            available_device_bytes=2**40,
        )
        self.ids = [f"r{number}" for number in range(batch)]
        self.coordinator: HiSparseCoordinator = build_tiers(self.sizes, device)
        for pool in (self.coordinator.host.kv, self.coordinator.host.index_keys):
            everything = pool.flatten(0, 1)
            for start in range(0, len(everything), _FILL_ROWS):
                rows = everything[start : start + _FILL_ROWS]
                values = torch.randn(len(rows), rows.shape[1] // 2, dtype=torch.bfloat16, device=device)
                rows.copy_(values.view(torch.uint8))
        for request_id in self.ids:
            slots = self.coordinator.host.allocate(shape.context)
            if slots is None or not self.coordinator.admit_request_direct(request_id, slots, shape.context):
                raise RuntimeError(f"the pools have no room for request {request_id} of {batch}")

    def make_room(self) -> None:
        """For the next token of each request. Raises RuntimeError if there is none."""
        if short_of := self.coordinator.append_tokens(self.ids):
            raise RuntimeError(f"the pools have no room for a token of {len(short_of)} requests")

    def close(self) -> None:
        """Finish the requests and unpin the host pool. Raises what the device found wrong in the meantime."""
        for request_id in self.ids:
            self.coordinator.request_finished(request_id)
        if not self.coordinator.is_idle():
            raise RuntimeError("finished requests left something behind")
        if violations := self.coordinator.counters().violations:
            raise RuntimeError(f"{violations} swap-in violations: what was timed is no decode step")
        self.coordinator.close()
