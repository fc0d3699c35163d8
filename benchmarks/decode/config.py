"""How `hisparse-pd bench decode` is configured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from base.flags import Flag
from model.families import ShapeName

Shape = Annotated[ShapeName, Flag("Whose widths to take.")]
Layers = Annotated[int | None, Flag("Layers, or all of the shape's.", min=1)]
RankOf = Annotated[
    int,
    Flag("Of a group of so many: that part of the experts, for the tokens of all; nothing is exchanged.", min=1),
]
Quantization = Annotated[Literal["none", "fp8"], Flag("Of the weights: bfloat16, or block-fp8.")]
CacheDtype = Annotated[Literal["bfloat16", "fp8_e4m3"], Flag("Of items and index keys.")]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """The flags of the benchmark."""

    shape: Shape = "deepseek-v3.2"
    layers: Layers = None
    rank_of: RankOf = 1
    batches: Annotated[tuple[str, ...], Flag("Requests that decode, such as 1,16,64.", name="--batch")] = ()
    new_positions: Annotated[
        tuple[str, ...], Flag("Selected positions that are new in each step and layer, such as 0,275.")
    ] = ()
    selections: Annotated[
        tuple[str, ...],
        Flag("What steps select instead: published (benchmarks.swap_in.published) or recorded:FILE; may be repeated."),
    ] = ()
    requests_in_group: Annotated[
        int | None,
        Flag("Requests of all ranks together; default: as many in each. Padding of others hits no experts.", min=1),
    ] = None
    speculative_num_steps: Annotated[
        int, Flag("Drafts of each request that a step verifies, all of them right, and makes anew.", min=0, max=3)
    ] = 0
    context: Annotated[int, Flag("Tokens of each request.", min=1)] = 32768
    device_buffer_size: Annotated[int, Flag("Hot slots of each request.", min=1)] = 4096
    pools_gib: Annotated[
        float | None,
        Flag(
            "What a node makes of so much HBM for KV: larger buffers, requests that are whole; a limit of --resident.",
            min=0.001,
        ),
    ] = None
    max_running_requests: Annotated[
        int | None, Flag("Requests that the node of --pools-gib may run; default: those that it runs.", min=1)
    ] = None
    resident: Annotated[bool, Flag("With all KV in HBM instead, and nothing that looks for it.")] = False
    resident_rows: Annotated[bool, Flag("With rows that become resident first, as a node's do.")] = False
    quantization: Quantization = "fp8"
    kv_cache_dtype: CacheDtype = "fp8_e4m3"
    steps: Annotated[int, Flag("Steps that are timed of each case.", min=10)] = 30
    json: Annotated[Path, Flag("Where to write every figure.")] = Path("bench-decode.json")
    png: Annotated[Path, Flag("Where to draw the parts of a step.")] = Path("bench-decode.png")

    @property
    def pool_bytes(self) -> int | None:
        """Of `pools_gib`."""
        return int(self.pools_gib * 2**30) if self.pools_gib else None
