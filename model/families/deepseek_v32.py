"""DeepSeek-V3.2: every layer has an indexer."""

from typing import Any

from model.families.family import LayerKind, ModelFamily


def _layers(config: Any) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(indexer=True, mixture=mlp == "sparse") for mlp in config.mlp_layer_types[: config.num_hidden_layers]
    )


DEEPSEEK_V32 = ModelFamily(
    model_type="deepseek_v32",
    index_interleaved=False,
    layers=_layers,
    shapes={"deepseek-v3.2": {"architectures": ["DeepseekV32ForCausalLM"]}},
)
