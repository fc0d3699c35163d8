"""What a model family is: what its networks have that others have not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class LayerKind(NamedTuple):
    """What a decoder layer consists of, besides attention and norms.

    indexer: it selects positions by itself; else it uses the selection of the layer before it. mixture: its
    feed-forward network is a mixture of experts.
    """

    indexer: bool
    mixture: bool


@dataclass(frozen=True)
class ModelFamily:
    """Networks of one `model_type` of transformers, with multi-head latent attention and DeepSeek's indexer.

    Weights have the names of DeepSeek-V3.2's published checkpoint in every family. index_interleaved: the indexer
    rotates neighbouring elements as a pair; else the first half with the second. layers: the kinds of the decoder
    layers of a configuration of transformers, without the multi-token prediction layers; raises ValueError for what is
    not served. shapes: what the config.json of published models has besides the defaults of transformers, by name.
    tiny: what that of a tiny checkpoint has besides the common part.
    """

    model_type: str
    index_interleaved: bool
    layers: Callable[[Any], tuple[LayerKind, ...]]
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
