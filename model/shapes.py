"""Configurations of published models, for nodes that are to have their widths and not their weights.

The defaults of transformers are the published config.json files, except for what `ModelFamily.shapes` has.
"""

from typing import Any

from model.families import FAMILIES, ShapeName


def published_config(name: ShapeName, layers: int | None = None, routed_experts: int | None = None) -> dict[str, Any]:
    """A published model's config.json, with fewer layers or experts where these are given.

    The first three layers are dense, as published, and the others mixtures of experts. Fewer experts than groups of
    them make one group. Raises ValueError for numbers that cannot be.
    """
    # Here, since importing transformers takes seconds, and the command line need not wait for it.
    from transformers import AutoConfig

    family = next(family for family in FAMILIES.values() if name in family.shapes)
    shape = {**family.shapes[name], "model_type": family.model_type, "dtype": "bfloat16"}
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
