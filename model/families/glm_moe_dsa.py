"""GLM-5: some layers use the selection of an earlier layer.

It is published how many layers of GLM-5.2 have an indexer. Which ones is a guess: the first three and every fourth of
the others.
"""

from typing import Any

from model.families.family import LayerKind, ModelFamily

_GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


def _layers(config: Any) -> tuple[LayerKind, ...]:
    number = config.num_hidden_layers
    # Entries past the last layer belong to the multi-token prediction layers, which are not loaded.
    indexers = (config.indexer_types or ["full"] * number)[:number]
    if len(indexers) < number or not set(indexers) <= {"full", "shared"} or indexers[0] != "full":
        raise ValueError(
            f"expected 'full' or 'shared' as indexer_types for each of its {number} layers, the first one 'full', "
            f"found {indexers}"
        )
    return tuple(
        LayerKind(indexer=indexer == "full", mixture=mlp == "sparse")
        for indexer, mlp in zip(indexers, config.mlp_layer_types, strict=False)
    )


GLM_MOE_DSA = ModelFamily(
    model_type="glm_moe_dsa",
    index_interleaved=True,
    layers=_layers,
    shapes={
        "glm-5": _GLM_5,
        "glm-5.2": {**_GLM_5, "max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    },
    tiny={"index_topk_freq": 2},
)
