"""How a checkpoint's weights are quantised: block-fp8, as DeepSeek and GLM publish it, or not at all."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import StartupError
from model.fp8 import BLOCK


@dataclass(frozen=True)
class BlockFp8:
    """float8_e4m3 weights, each 128 x 128 block of which has a float32 scale, `weight_scale_inv`.

    power_of_two: scales are powers of two, those of activations too (`scale_fmt: ue8m0`).
    """

    power_of_two: bool = False


def read_quantization(path: Path, config: dict[str, Any]) -> BlockFp8 | None:
    """What config.json says of the checkpoint's quantisation. Raises StartupError for any that is not block-fp8."""
    for key in ("quantization_config", "compression_config"):
        if not (found := config.get(key)):
            continue
        method = found.get("quant_method") if isinstance(found, dict) else found
        if key != "quantization_config" or method != "fp8" or not isinstance(found, dict):
            raise StartupError(
                f"{path} has quantised weights ({key}: {method}), which are not served; "
                f"give a checkpoint with weights in float32, bfloat16 or block-fp8"
            )
        expected = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
        for name, value in expected.items():
            if found.get(name, value if name == "fmt" else None) != value:
                raise StartupError(
                    f"{path} has weights in fp8 with {name} {found.get(name)}, which are not served; served is {value}"
                )
        scale_format = found.get("scale_fmt") or "float"
        if scale_format not in ("float", "ue8m0"):
            raise StartupError(
                f"{path} has weights in fp8 with scale_fmt {scale_format}, which are not served; "
                "served are float and ue8m0"
            )
        return BlockFp8(power_of_two=scale_format == "ue8m0")
    return None
