"""How `hisparse-pd bench prefill` is configured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from base.errors import StartupError
from base.flags import Flag
from model.families import ShapeName

_CONTEXTS = ("8192", "32768")


@dataclass(frozen=True, kw_only=True)
class PrefillBench:
    """The flags of the benchmark. `contexts` has the words of `--context`, if there are any."""

    shape: Annotated[ShapeName, Flag("Whose widths to take.")] = "deepseek-v3.2"
    layers: Annotated[int | None, Flag("Layers, or all of the shape's.", min=1)] = None
    rank_of: Annotated[
        int,
        Flag("Of a group of so many: that part of the experts, for the tokens of all; nothing is exchanged.", min=1),
    ] = 1
    chunked_prefill_size: Annotated[int, Flag("Tokens of a chunk.", min=1)] = 8192
    contexts: Annotated[
        tuple[str, ...], Flag("Tokens of the prompt, the chunk included; may be repeated.", name="--context")
    ] = ()
    draft_layer: Annotated[bool, Flag("Compute the draft layer's KV, too.")] = False
    quantization: Annotated[Literal["none", "fp8"], Flag("Of the weights: bfloat16, or block-fp8.")] = "fp8"
    kv_cache_dtype: Annotated[Literal["bfloat16", "fp8_e4m3"], Flag("Of items and index keys.")] = "fp8_e4m3"
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
