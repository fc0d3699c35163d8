"""A model's shapes: those of a network's parts, from a checkpoint's config.json, and those that the service reads."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from base.errors import StartupError
from kernels.fp8 import BLOCK
from kernels.kv_format import KVFormat
from kernels.operands import BlockFp8, Rope, RouterConfig
from kvcache.choices import KVCacheDtype
from kvcache.format import kv_format
from kvcache.layout import KVLayout
from model.checkpoint import read_json
from model.families import FAMILIES, LayerKind

_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Those whose angles do not depend on the length of the sequence."""
_AS_PUBLISHED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
"""Keys that all published checkpoints agree in."""
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
)
"""Keys that are at least 1."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a sparse-attention model's KV and the identity of its weights.

    A *layer* stores one KV item per token, of `item_dim` elements: the normed latent (`latent_dim`, kv_lora_rank), then
    the roped key (qk_rope_head_dim). An *index layer* is a layer with an indexer of its own; it stores one index key
    per token. `index_layer_of[layer]` is the index layer whose selection the layer uses: its own, or the previous one
    where the checkpoint shares selections between layers. `kv_cache_dtype` chooses `kv_format`. `draft_layer` is the
    number of the layer that drafts tokens, which is the last one and an index layer; None if the node does not draft.
    """

    model_type: str
    num_layers: int
    index_layer_of: tuple[int, ...]
    item_dim: int
    latent_dim: int
    index_dim: int
    index_topk: int
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    fingerprint: str
    kv_cache_dtype: KVCacheDtype = "auto"
    draft_layer: int | None = None

    @property
    def num_index_layers(self) -> int:
        return self.index_layer_of[-1] + 1

    @property
    def kv_format(self) -> KVFormat:
        """How items and index keys are stored. Raises ValueError for widths that the format does not take."""
        rope_dim = self.item_dim - self.latent_dim
        return kv_format(self.kv_cache_dtype, self.dtype, self.latent_dim, rope_dim, self.index_dim)

    @property
    def kv_layout(self) -> KVLayout:
        """What the KV tiers store of one token."""
        return KVLayout(self.index_layer_of, self.kv_format.item_bytes, self.kv_format.index_key_bytes)


@dataclass(frozen=True)
class RopeAngles:
    """The angles of all positions: position times frequency for each of the rope_dim / 2 pairs.

    scale: factor of cos and sin, which yarn has.
    """

    frequencies: tuple[float, ...]
    scale: float

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> "Rope":
        """The rotation of tokens at int64 positions [N], computed in float32."""
        frequencies = self._frequencies_on(positions.device)
        angles = (positions.unsqueeze(-1).float() * frequencies).unsqueeze(1)
        return Rope((angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype))

    @functools.cache  # noqa: B019 a network has one, on one device
    def _frequencies_on(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.frequencies, device=device)


@dataclass(frozen=True)
class NetworkConfig:
    """A network of any family. layers: those before the final norm.

    Dimensions are numbers of elements. query_rank, latent_dim: of the compressed queries and keys (q_lora_rank,
    kv_lora_rank). nope_dim, rope_dim, value_dim: of a head. index_interleaved: see ModelFamily. scaling: of attention
    scores. tied_head: the head has the embedding's weights.

    draft_layers: multi-token prediction layers behind `layers` (num_nextn_predict_layers), of which only the first is
    served. drafts_share_selection: all drafts of a step use the positions that the layer selects for the first
    (index_share_for_mtp_iteration).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    heads: int
    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_interleaved: bool
    dense_width: int
    expert_width: int
    shared_width: int
    router: RouterConfig
    norm_eps: float
    scaling: float
    tied_head: bool
    max_position_embeddings: int
    rope: RopeAngles
    quantization: BlockFp8 | None
    draft_layers: int
    drafts_share_selection: bool

    def spec(
        self,
        dtype: torch.dtype,
        context_length: int,
        fingerprint: str,
        kv_cache_dtype: KVCacheDtype = "auto",
        drafts: bool = False,
    ) -> ModelSpec:
        """What the rest of the service reads of it. drafts: with the draft layer, which it has to have."""
        index_layer_of = self.index_layer_of
        if drafts:
            index_layer_of += (index_layer_of[-1] + 1,)
        return ModelSpec(
            model_type=self.model_type,
            num_layers=len(index_layer_of),
            index_layer_of=index_layer_of,
            item_dim=self.latent_dim + self.rope_dim,
            latent_dim=self.latent_dim,
            index_dim=self.index_dim,
            index_topk=self.index_topk,
            vocab_size=self.vocab_size,
            context_length=context_length,
            dtype=dtype,
            fingerprint=fingerprint,
            kv_cache_dtype=kv_cache_dtype,
            draft_layer=len(self.layers) if drafts else None,
        )

    @property
    def index_layer_of(self) -> tuple[int, ...]:
        """The number of the index layer whose selection each layer uses."""
        indexers = [kind.indexer for kind in self.layers]
        return tuple(sum(indexers[: layer + 1]) - 1 for layer in range(len(indexers)))


def read_config(path: Path) -> NetworkConfig:
    """The configuration of the checkpoint in a directory, with the defaults of transformers for what config.json lacks.

    Raises StartupError for other models, and for what is not served.
    """
    raw = read_json(path / "config.json")
    model_type = raw.get("model_type")
    if model_type not in (*FAMILIES,):
        raise StartupError(
            f"{path} is not a sparse-attention (DSA) checkpoint: its model_type is {model_type!r}; "
            f"supported: {', '.join(FAMILIES)}"
        )
    if raw.get("q_lora_rank", 0) is None:
        raise StartupError(f"{path}/config.json has q_lora_rank null: the indexer needs low-rank queries")
    quantization = _quantization(path, raw)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the library's validation raises classes of its own and of its dependencies
        raise StartupError(
            f"{path}/config.json is not a valid {model_type} config: {' '.join(str(error).split())}"
        ) from error
    try:
        return network_config(config, quantization)
    except ValueError as error:
        raise StartupError(f"{path}/config.json: {error}") from error


def network_config(config: Any, quantization: BlockFp8 | None = None) -> NetworkConfig:
    """The sizes in a configuration of transformers. Raises ValueError for what is not served."""
    family = FAMILIES[config.model_type]
    _check(config)
    return NetworkConfig(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=family.layers(config),
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        latent_dim=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        index_interleaved=family.index_interleaved,
        dense_width=config.intermediate_size,
        expert_width=config.moe_intermediate_size,
        shared_width=config.moe_intermediate_size * config.n_shared_experts,
        router=RouterConfig(
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        norm_eps=config.rms_norm_eps,
        scaling=_attention_scaling(config),
        tied_head=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        rope=_rope_angles(config),
        quantization=quantization,
        draft_layers=getattr(config, "num_nextn_predict_layers", None) or 0,
        drafts_share_selection=bool(getattr(config, "index_share_for_mtp_iteration", False)),
    )


def _check(config: Any) -> None:
    """Raise ValueError for what is not served, and for sizes that no network can have."""
    for key, expected in _AS_PUBLISHED.items():
        if getattr(config, key) != expected:
            raise ValueError(f"{key} {getattr(config, key)!r} is not served; served is {expected!r}")
    for key in (*_SIZES, "n_shared_experts"):
        if getattr(config, key) < (least := int(key in _SIZES)):
            raise ValueError(f"{key} must be at least {least}, not {getattr(config, key)}")
    drafts = getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(drafts, int | None):
        raise ValueError(f"num_nextn_predict_layers must be a number of layers, not {drafts!r}")
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > config.index_head_dim:
        raise ValueError(
            f"qk_rope_head_dim must be even and at most index_head_dim ({config.index_head_dim}), "
            f"not {config.qk_rope_head_dim}"
        )
    experts, groups, chosen, top_k = (
        getattr(config, key) for key in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    )
    of_group = experts // groups
    if experts % groups or of_group < 2 <= groups or chosen > groups or top_k > chosen * of_group:
        raise ValueError(
            f"n_routed_experts {experts} must be equal groups of at least 2 (n_group {groups}), of which topk_group "
            f"{chosen} have at least num_experts_per_tok {top_k} experts"
        )


def _attention_scaling(config: Any) -> float:
    """Of the scores: yarn with mscale_all_dim scales queries and keys, too (DeepSeek-V3's published code)."""
    scaling = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    if rope["rope_type"] != "default" and (all_dim := rope.get("mscale_all_dim", 0)) and rope["factor"] > 1:
        scaling *= (0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2
    return scaling


def _rope_angles(config: Any) -> RopeAngles:
    parameters = config.rope_parameters
    rope_type, dim = parameters["rope_type"], config.qk_rope_head_dim
    if rope_type not in _ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type} is not served; served are {', '.join(_ROPE_TYPES)}")
    for key in ("rope_theta", "factor"):
        if not isinstance(value := parameters.get(key, 1), int | float) or not 0 < value < math.inf:
            raise ValueError(f"{key} of rope_parameters must be a number above 0, not {value!r}")
    if rope_type == "default":
        frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        return RopeAngles(tuple(frequencies.tolist()), 1.0)
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    return RopeAngles(tuple(frequencies.tolist()), float(scale))


def _quantization(path: Path, config: dict[str, Any]) -> BlockFp8 | None:
    """What config.json says of the checkpoint's quantisation. Raises StartupError for any that is not block-fp8."""
    for key in ("quantization_config", "compression_config"):
        if not (found := config.get(key)):
            continue
        method = found.get("quant_method") if isinstance(found, dict) else found
        if key != "quantization_config" or method != "fp8" or not isinstance(found, dict):
            raise StartupError(
                f"{path} has quantised weights ({key}: {method}), which are not served; "
                f"give a checkpoint with weights in float32, bfloat16 or block-fp8"
            )
        expected = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
        for name, value in expected.items():
            if found.get(name, value if name == "fmt" else None) != value:
                raise StartupError(
                    f"{path} has weights in fp8 with {name} {found.get(name)}, which are not served; served is {value}"
                )
        scale_format = found.get("scale_fmt") or "float"
        if scale_format not in ("float", "ue8m0"):
            raise StartupError(
                f"{path} has weights in fp8 with scale_fmt {scale_format}, which are not served; "
                "served are float and ue8m0"
            )
        return BlockFp8(power_of_two=scale_format == "ue8m0")
    return None
