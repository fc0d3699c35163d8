"""Distances to float32: those of the served model beside those of the plain computation."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.logits.checkpoint import SIZES, PublishedShape, RandomCheckpoint, Sizes, random_checkpoint
from benchmarks.logits.forced import forced_logits
from benchmarks.logits.plain import EXACT, Arithmetic, PlainNetwork
from kvcache.choices import KVCacheDtype
from kvcache.format import Fp8Format
from model.loader import choose_backend, load_model, read_spec

KV: tuple[KVCacheDtype, ...] = ("bfloat16", "fp8_e4m3")
CHUNK = 1024
STEPS = (256, 128, 64, 32, 16, 8, 4, 2, 1, 1)
"""Tokens of each decode step. There are kernels for few and for many."""


@dataclass(frozen=True)
class Distance:
    """Of logits to those in float32, over positions and vocabulary."""

    mean: float
    p99: float

    @classmethod
    def of(cls, logits: torch.Tensor, exact: torch.Tensor) -> "Distance":
        """Raises ValueError for logits that are no numbers."""
        apart = (logits - exact).abs().flatten()
        if not apart.isfinite().all():
            raise ValueError("there are logits that are not finite numbers")
        return cls(float(apart.mean()), float(apart.kthvalue(round(0.99 * len(apart))).values))


@dataclass(frozen=True)
class Comparison:
    """One text of `tokens`, with one KV format. scale: root mean square of the logits in float32."""

    shape: PublishedShape
    kv_cache_dtype: KVCacheDtype
    tokens: int
    all_selected: bool
    scale: float
    plain: Distance
    ours: Distance

    @property
    def worst(self) -> float:
        """The larger ratio of our distance to the plain one."""
        return max(self.ours.mean / self.plain.mean, self.ours.p99 / self.plain.p99)


def compare(
    shape: PublishedShape, lengths: list[int], device: torch.device, sizes: Sizes = SIZES
) -> Iterator[Comparison]:
    """A comparison for each length and KV format, of the last sum(STEPS) tokens of each random text.

    Raises StartupError for a CUDA device whose kernels cannot run.
    """
    checkpoint = random_checkpoint(shape, device, sizes)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        checkpoint.write(path)
        exact = {length: _plain(checkpoint, EXACT, _text(checkpoint, length, device)) for length in lengths}
        for kv_cache_dtype in KV:
            spec = read_spec(path, torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
            backend = choose_backend("triton" if device.type == "cuda" else "torch", device, spec)
            model = load_model(path, torch.bfloat16, device, backend=backend, kv_cache_dtype=kv_cache_dtype)
            kv_format = spec.kv_format
            arithmetic = Arithmetic(
                torch.bfloat16, quantises=True, kv=kv_format if isinstance(kv_format, Fp8Format) else None
            )
            for length in lengths:
                text, truth = _text(checkpoint, length, device), exact[length]
                yield Comparison(
                    shape,
                    kv_cache_dtype,
                    length,
                    length <= spec.index_topk,
                    float(truth.square().mean().sqrt()),
                    Distance.of(_plain(checkpoint, arithmetic, text), truth),
                    Distance.of(forced_logits(model, text, STEPS, CHUNK), truth),
                )


def _plain(checkpoint: RandomCheckpoint, arithmetic: Arithmetic, text: torch.Tensor) -> torch.Tensor:
    return PlainNetwork(checkpoint.tensors, checkpoint.config, arithmetic).logits(text, sum(STEPS))


def _text(checkpoint: RandomCheckpoint, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, checkpoint.config.vocab_size, (length,), generator=generator).to(device)
