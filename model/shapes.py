"""Configurations of published models, for nodes that are to have their widths and not their weights.

The defaults of transformers are the published config.json files, except for what stands here. Of GLM-5.2 it is
published how many layers have an indexer; which ones is a guess: the first three and every fourth of the others.
"""

from typing import Any, Literal

ShapeName = Literal["deepseek-v3.2", "glm-5", "glm-5.2"]

_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_SHAPES: dict[ShapeName, dict[str, Any]] = {
    "deepseek-v3.2": {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
    "glm-5": _GLM,
    "glm-5.2": {**_GLM, "max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3},
}


def published_config(name: ShapeName, layers: int | None = None, routed_experts: int | None = None) -> dict[str, Any]:
    """A published model's config.json, with fewer layers or experts where these are given.

    The first three layers are dense, as published, and the others mixtures of experts. Fewer experts than groups of
    them make one group. Raises ValueError for numbers that cannot be.
    """
    # Here, since the command line reads the names above, and importing transformers takes seconds.
    from transformers import AutoConfig

    shape = _SHAPES[name] | {"dtype": "bfloat16"}
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
