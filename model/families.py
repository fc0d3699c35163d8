"""The model families that are served, and the configurations of published models.

Importing this takes no time: the command line reads the names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FamilyName = Literal["deepseek_v32", "glm_moe_dsa"]
"""`model_type` in config.json."""
ShapeName = Literal["deepseek-v3.2", "glm-5", "glm-5.2", "glm-5.3"]
"""Published models, whose widths a node may have without their weights."""


class LayerKind(NamedTuple):
    """What a decoder layer consists of, besides attention and norms.

    indexer: it selects positions by itself; else it uses the selection of the layer before it. mixture: its
    feed-forward network is a mixture of experts.
    """

    indexer: bool
    mixture: bool


DRAFT_LAYER = LayerKind(indexer=True, mixture=True)
"""The kind of the multi-token prediction layer in all families."""


@dataclass(frozen=True)
class ModelFamily:
    """Networks of one `model_type` of transformers, with multi-head latent attention and DeepSeek's indexer.

    Weights have the names of DeepSeek-V3.2's published checkpoint in every family. index_interleaved: the indexer
    rotates neighbouring elements as a pair; else the first half with the second. layers: the kinds of the decoder
    layers of a configuration of transformers, without the multi-token prediction layers; raises ValueError for what is
    not served. shapes: what the config.json of published models has besides the defaults of transformers, by name.
    tiny: what that of a tiny checkpoint has besides the common part. repeats_vocabulary: the multi-token prediction
    layers of published checkpoints have copies of the embedding and of the head.
    """

    index_interleaved: bool
    layers: Callable[[Any], tuple[LayerKind, ...]]
    shapes: Mapping[str, Mapping[str, Any]]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    repeats_vocabulary: bool = False


def _deepseek_layers(config: Any) -> tuple[LayerKind, ...]:
    """Every layer has an indexer."""
    return tuple(LayerKind(True, mlp == "sparse") for mlp in config.mlp_layer_types[: config.num_hidden_layers])


def _glm_layers(config: Any) -> tuple[LayerKind, ...]:
    """Some layers use the selection of an earlier layer."""
    number = config.num_hidden_layers
    # Entries past the last layer are those of the multi-token prediction layers, whose kind is always the same.
    indexers = (config.indexer_types or ["full"] * number)[:number]
    if len(indexers) < number or not set(indexers) <= {"full", "shared"} or indexers[0] != "full":
        raise ValueError(
            f"expected 'full' or 'shared' as indexer_types for each of its {number} layers, the first one 'full', "
            f"found {indexers}"
        )
    kinds = zip(indexers, config.mlp_layer_types, strict=False)
    return tuple(LayerKind(indexer == "full", mlp == "sparse") for indexer, mlp in kinds)


_GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
# Of the layers of GLM-5.2 the first three and every fourth after them have an indexer. GLM-5.3 has other weights and
# another chat template.
_GLM_5_2 = {
    **_GLM_5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000.0},
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
}

FAMILIES: Mapping[FamilyName, ModelFamily] = {
    "deepseek_v32": ModelFamily(
        index_interleaved=False,
        layers=_deepseek_layers,
        shapes={"deepseek-v3.2": {"architectures": ["DeepseekV32ForCausalLM"], "num_nextn_predict_layers": 1}},
        repeats_vocabulary=True,
    ),
    "glm_moe_dsa": ModelFamily(
        index_interleaved=True,
        layers=_glm_layers,
        shapes={"glm-5": _GLM_5, "glm-5.2": _GLM_5_2, "glm-5.3": _GLM_5_2},
        tiny={"index_topk_freq": 2, "index_share_for_mtp_iteration": True},
    ),
}


def published_config(name: ShapeName, layers: int | None = None, routed_experts: int | None = None) -> dict[str, Any]:
    """A published model's config.json, with fewer layers or experts where these are given.

    The first three layers are dense, as published, and the others mixtures of experts. Fewer experts than groups of
    them make one group. Raises ValueError for numbers that cannot be.
    """
    # Here, since importing transformers takes seconds, and the command line need not wait for it.
    from transformers import AutoConfig

    model_type, family = next(item for item in FAMILIES.items() if name in item[1].shapes)
    shape = {**family.shapes[name], "model_type": model_type, "dtype": "bfloat16"}
    published = AutoConfig.for_model(**shape)
    layers = published.num_hidden_layers if layers is None else layers
    experts = published.n_routed_experts if routed_experts is None else routed_experts
    if layers < 1 or experts < 1:
        raise ValueError(f"layers and routed_experts must be at least 1, not {layers} and {experts}")
    shape |= {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(published.num_experts_per_tok, experts),
    }
    if experts % published.n_group or experts // published.n_group < 2:
        shape |= {"n_group": 1, "topk_group": 1}
    return AutoConfig.for_model(**shape).to_dict()  # type: ignore[no-any-return]
