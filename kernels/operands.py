"""What operations take and return: tensors and numbers that belong together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RmsNorm:
    """Norm by the root mean square (Zhang, Sennrich, arXiv:1910.07467). weight: [dim].

    Computed in float32 and rounded once, where transformers rounds before it applies the weight, too.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """Norm by mean and variance (Ba, Kiros, Hinton, arXiv:1607.06450). weight, bias: [dim]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Rope:
    """The rotation of N tokens: cos and sin of each pair's angle, shape [N, 1, rope_dim / 2], in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def dim(self) -> int:
        """rope_dim."""
        return 2 * self.cos.shape[-1]


@dataclass(frozen=True)
class BlockFp8:
    """float8_e4m3 weights, each 128 x 128 block of which has a float32 scale (`kernels.fp8`).

    power_of_two: scales are powers of two, those of activations too (`scale_fmt: ue8m0`).
    """

    power_of_two: bool = False


@dataclass(frozen=True)
class Activations:
    """The input of linear maps: [N, in] in the network's dtype, and in block-fp8 where it has been quantised.

    values: float8_e4m3 [N, in]. scales: float32 [N, ceil(in / 128)] with strides (1, N). Both as
    `kernels.fp8.quantise_activations` says. Linear maps do not take values and scales that lie in wider rows
    (`model.shard.RoutedTokens`).
    """

    dense: torch.Tensor
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class PartialSums:
    """Numbers [N, columns]: `scale` times the sum of `parts`, float32 [parts, N, columns], over the first dimension.

    The kernel that reads them adds them up, so that the sum takes no kernel of its own.
    """

    parts: torch.Tensor
    scale: float = 1.0

    @classmethod
    def of(cls, numbers: torch.Tensor) -> "PartialSums":
        """Complete numbers, float32 [N, columns]."""
        return cls(numbers.unsqueeze(0))

    def __getitem__(self, tokens: slice) -> "PartialSums":
        """The numbers of some of the tokens."""
        return PartialSums(self.parts[:, tokens], self.scale)

    def reduce(self) -> torch.Tensor:
        """The numbers, float32 [N, columns]."""
        total = self.parts[0] if len(self.parts) == 1 else self.parts.sum(0)
        return total if self.scale == 1.0 else total * self.scale


@dataclass(frozen=True)
class IndexQueries:
    """The indexer's queries of N tokens.

    queries: [N, index_heads, index_dim]. weight_sums: the weights of the heads, float32 [N, index_heads].
    """

    queries: torch.Tensor
    weight_sums: PartialSums

    @classmethod
    def of(cls, queries: torch.Tensor, head_weights: torch.Tensor) -> "IndexQueries":
        """Queries whose heads' weights are complete, float32 [N, index_heads]."""
        return cls(queries, PartialSums.of(head_weights))

    @property
    def head_weights(self) -> torch.Tensor:
        """The weights of the heads, float32 [N, index_heads], which may have to be added up first."""
        return self.weight_sums.reduce()

    def __getitem__(self, tokens: slice) -> "IndexQueries":
        """The queries of some of the tokens."""
        return IndexQueries(self.queries[tokens], self.weight_sums[tokens])


@dataclass(frozen=True)
class PagedKeys:
    """Paged index keys of a decode batch in one index layer.

    keys: uint8 [num_pages, page_size, index_key_bytes]. page_table: int64 [batch, max_pages]; entries past a row's
    length are arbitrary valid pages. seq_lens: int64 [batch], counting the newest token, whose key is already stored;
    0 for padding. lengths: `seq_lens` on the host; None where only the device knows them. rows_each: so many rows one
    after the other are queries of one request, whose pages are the same.
    """

    keys: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    lengths: Sequence[int] | None = None
    rows_each: int = 1


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen.

    A token chooses `top_k` among the experts of the `top_groups` best of `groups` groups of equal size, by the sum of
    their two best experts. If `normalise`, its weights are divided by their sum before they are multiplied by `scale`.
    """

    experts: int
    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scale: float


@dataclass(frozen=True)
class SwiGluWeights:
    """A feed-forward network with weights in block-fp8, or a stack of experts E, those from number `first` on.

    gate_up: fp8 [(E,) 2 * W, H], the rows of gate before those of up. down: fp8 [(E,) H, W]. Scales: float32, one for
    each block of 128 x 128. W is a multiple of 128, so that no block holds rows of gate and of up.
    """

    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    power_of_two: bool = False
    first: int = 0

    def __getitem__(self, expert: int) -> "SwiGluWeights":
        """One of the stack."""
        return SwiGluWeights(
            self.gate_up[expert],
            self.gate_up_scales[expert],
            self.down[expert],
            self.down_scales[expert],
            self.power_of_two,
        )


@dataclass(frozen=True)
class Threshold:
    """Logits above `least` stay, and some of those equal to it.

    least: float32 [n, 1]. equals: int64 [n, 1], how many of the tokens that equal it stay, at least 1.
    """

    least: torch.Tensor
    equals: torch.Tensor
