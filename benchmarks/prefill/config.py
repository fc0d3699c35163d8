"""How `hisparse-pd bench prefill` is configured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from base.errors import StartupError
from base.flags import Flag
from benchmarks.decode.config import CacheDtype, Layers, Quantization, RankOf, Shape

_CONTEXTS = ("8192", "32768")


@dataclass(frozen=True, kw_only=True)
class PrefillBench:
    """The flags of the benchmark. `contexts` has the words of `--context`, if there are any."""

    shape: Shape = "deepseek-v3.2"
    layers: Layers = None
    rank_of: RankOf = 1
    chunked_prefill_size: Annotated[int, Flag("Tokens of a chunk.", min=1)] = 8192
    contexts: Annotated[
        tuple[str, ...], Flag("Tokens of the prompt, the chunk included; may be repeated.", name="--context")
    ] = ()
    draft_layer: Annotated[bool, Flag("Compute the draft layer's KV, too.")] = False
    quantization: Quantization = "fp8"
    kv_cache_dtype: CacheDtype = "fp8_e4m3"
    passes: Annotated[int, Flag("Forward passes that are timed of each case.", min=1)] = 3
    json: Annotated[Path, Flag("Where to write every figure.")] = Path("bench-prefill.json")
    png: Annotated[Path, Flag("Where to draw the parts of a chunk.")] = Path("bench-prefill.png")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt. Raises StartupError for words that are no numbers, and for less than a chunk."""
        words = self.contexts or _CONTEXTS
        least = self.chunked_prefill_size
        if not all(word.isdecimal() and int(word) >= least for word in words):
            raise StartupError(f"--context {' '.join(words)}: expected whole numbers from {least}, the chunk's tokens")
        return [int(word) for word in words]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lengths)
