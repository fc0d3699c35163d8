"""The formats of KV: vectors of one type, or fp8 with scales, in plain torch.

`kernels.kv_format` says where the bytes of fp8 lie. Items have the layout that FlashMLA's sparse decode reads
("V32_FP8Sparse" in `tests/quant.py` and README of github.com/deepseek-ai/FlashMLA) and that vLLM writes
(`concat_and_cache_ds_mla_kernel` in its `csrc/cache_kernels.cu`).

An index key is multiplied by the orthonormal Hadamard matrix of Sylvester's order before it is quantised, as queries
are, which leaves products as they are and spreads outliers over all elements, so that one scale serves them all.
DeepSeek-V3.2's published inference code does so (`rotate_activation`, `Indexer.forward` in `inference/model.py` of the
checkpoint's repository).

A scale is max(largest magnitude, 1e-4) / 448 in float32, and 448 is the largest float8_e4m3. Those of items are rounded
up to powers of two, as in FlashMLA's test: a number that is read is then exact in bfloat16, and reading it takes one
multiplication (csrc/item_tiles.cuh). Others differ in details that do not change how the bytes are read. vLLM
takes max(largest magnitude / 448, FLT_MIN) for items; for index keys (`indexer_k_quant_and_cache_kernel`) it takes this
rule, and rounds up to a power of two for checkpoints with `scale_fmt: ue8m0`.

An item of 656 bytes is 41 times 16 bytes, so that 16-byte copies are aligned.
"""

from dataclasses import dataclass

import torch

from kernels.fp8 import LEAST_AMAX, MAX
from kernels.kv_format import SCALED_TOGETHER, Fp8Layout, KVFormat
from kvcache.choices import KVCacheDtype

_LEAST_INDEX_DIM = 16
"""The least that a tensor core multiplies in fp8."""


def kv_format(name: KVCacheDtype, computed: torch.dtype, latent_dim: int, rope_dim: int, index_dim: int) -> "KVFormat":
    """The format of that name, for a model of these widths that computes in `computed`.

    Raises ValueError for widths that the format does not take.
    """
    if name == "fp8_e4m3":
        return Fp8Format(latent_dim, rope_dim, index_dim)
    dtypes = {"auto": computed, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return DenseFormat(dtypes[name], latent_dim + rope_dim, index_dim)


@dataclass(frozen=True)
class DenseFormat(KVFormat):
    """Items and index keys as vectors of one floating-point type: encoding converts, reading is a view."""

    dtype: torch.dtype
    item_dim: int
    index_dim: int

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def item_bytes(self) -> int:
        return self.item_dim * self.dtype.itemsize

    @property
    def index_key_bytes(self) -> int:
        return self.index_dim * self.dtype.itemsize

    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        return items.to(self.dtype).contiguous().view(torch.uint8)

    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.to(self.dtype).contiguous().view(torch.uint8)

    def items(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.dtype)

    def items_at(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.items(stored)[rows]

    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.dtype)

    def triton_refusal(self, computed: torch.dtype) -> str | None:
        if computed == self.dtype:
            return None
        wanted = str(computed).removeprefix("torch.")
        return f"reads KV of the type that it computes in, {wanted}, or fp8_e4m3, not {self.name}"


@dataclass(frozen=True)
class Fp8Format(Fp8Layout, KVFormat):
    """float8_e4m3 with float32 scales, see above; reading gives float32.

    Raises ValueError for widths that the layout has no room for: latent_dim must be a multiple of 4, rope_dim of 2, and
    index_dim a power of two of at least 4.
    """

    def __post_init__(self) -> None:
        index_dim = self.index_dim
        if self.latent_dim % 4 or self.rope_dim % 2 or index_dim < 4 or index_dim & (index_dim - 1):
            raise ValueError(
                "it takes a kv_lora_rank that is a multiple of 4, an even qk_rope_head_dim and an index_head_dim "
                f"that is a power of two, not {self.latent_dim}, {self.rope_dim} and {index_dim}"
            )

    @property
    def name(self) -> str:
        return "fp8_e4m3"

    @property
    def fp8_layout(self) -> Fp8Layout:
        return self

    def encode_items(self, items: torch.Tensor) -> torch.Tensor:
        latents, ropes = items[..., : self.latent_dim], items[..., self.latent_dim :]
        quantised, scales = quantise(latents, SCALED_TOGETHER, power_of_two=True)
        return torch.cat((_bytes(quantised), _bytes(scales), _bytes(ropes.to(torch.bfloat16))), dim=-1)

    def encode_index_keys(self, keys: torch.Tensor) -> torch.Tensor:
        quantised, scales = quantise(rotate(keys), self.index_dim)
        return torch.cat((_bytes(quantised), _bytes(scales)), dim=-1)

    def items(self, stored: torch.Tensor) -> torch.Tensor:
        latents = _part(stored, 0, self.latent_dim, torch.float8_e4m3fn).float()
        scales = _part(stored, self.latent_dim, self.rope_at, torch.float32)
        ropes = _part(stored, self.rope_at, self.item_bytes, torch.bfloat16).float()
        each = scales.repeat_interleave(SCALED_TOGETHER, dim=-1)[..., : self.latent_dim]
        return torch.cat((latents * each, ropes), dim=-1)

    def items_at(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        # Gathered as words, of which there are fewer.
        return self.items(stored.view(torch.int32)[rows].view(torch.uint8))

    def index_keys(self, stored: torch.Tensor) -> torch.Tensor:
        keys = _part(stored, 0, self.index_dim, torch.float8_e4m3fn).float()
        return keys * _part(stored, self.index_dim, self.index_key_bytes, torch.float32)

    def index_queries(self, queries: torch.Tensor) -> torch.Tensor:
        return rotate(queries)

    def triton_refusal(self, computed: torch.dtype) -> str | None:
        if computed != torch.bfloat16:
            return f"reads fp8 KV in bfloat16 models, not in {computed}"
        if self.index_dim < _LEAST_INDEX_DIM:
            return f"reads fp8 index keys with an index_head_dim of {_LEAST_INDEX_DIM} or more, not {self.index_dim}"
        return None


def quantise(x: torch.Tensor, together: int, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x, [..., dim], as float8_e4m3 [..., dim] and float32 scales [..., ceil(dim / together)], rounded to nearest.

    Every started `together` elements share a scale. power_of_two: these are rounded up to powers of two. What is not
    finite stays so: a NaN or infinity among them is read back as NaN.
    """
    dim = x.shape[-1]
    groups = -(-dim // together)
    padded = torch.nn.functional.pad(x.float(), (0, groups * together - dim)).view(*x.shape[:-1], groups, together)
    scales = padded.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / MAX
    if power_of_two:
        # A mantissa that is not zero carries into the exponent.
        rounded = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scales = torch.where(scales.isfinite(), rounded, scales)
    quantised = (padded / scales).clamp(-MAX, MAX).flatten(-2)[..., :dim].to(torch.float8_e4m3fn)
    return quantised.contiguous(), scales.squeeze(-1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x, [..., dim], times the orthonormal Hadamard matrix of Sylvester's order, which is its own inverse.

    Entry i, j of the matrix is negative where i and j have an odd number of one bits in common. dim: a power of two.
    Returns float32. Computed by log2(dim) rounds of sums and differences (the fast Walsh-Hadamard transform), whose
    rounding, unlike a matrix product's, does not depend on how many vectors there are.
    """
    dim, half = x.shape[-1], 1
    rotated: torch.Tensor = x.float()
    while half < dim:
        low, high = rotated.reshape(*x.shape[:-1], dim // (2 * half), 2, half).unbind(-2)
        rotated = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return rotated.mul(dim**-0.5)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # Not `contiguous`, which leaves the strides of a tensor without elements as they are.
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _part(stored: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes begin to end of each of the vectors, read as numbers. The copy begins where such numbers may begin."""
    return stored[..., begin:end].clone(memory_format=torch.contiguous_format).view(dtype)
