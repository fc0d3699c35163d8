"""`--hisparse-config`, read once into a typed object."""

import json
from dataclasses import dataclass

from base.errors import StartupError
from hisparse.residency import MAX_DEVICE_BUFFER_SIZE

DEFAULT_HOST_TO_DEVICE_RATIO = 8.0


@dataclass(frozen=True)
class HiSparseConfig:
    """How the KV tiers are to be sized. Exactly one of host_to_device_ratio and host_pool_gib is set.

    device_buffer_size: hot slots of a request, not counting the one extra for its newest token. top_k: positions that
    a layer selects. host_to_device_ratio: host slots / hot slots. host_pool_gib: size of the host pool in GiB.
    swap_in_block_size: threads per block of the CUDA swap-in kernel; None leaves it to the backend.
    """

    device_buffer_size: int
    top_k: int
    host_to_device_ratio: float | None = DEFAULT_HOST_TO_DEVICE_RATIO
    host_pool_gib: float | None = None
    swap_in_block_size: int | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise StartupError(f"hisparse-config: top_k must be at least 1, found {self.top_k}")
        if not self.top_k <= self.device_buffer_size <= MAX_DEVICE_BUFFER_SIZE:
            raise StartupError(
                f"hisparse-config: device_buffer_size must be at least top_k ({self.top_k}), so that the buffer holds "
                f"all that one step selects, and at most {MAX_DEVICE_BUFFER_SIZE}, found {self.device_buffer_size}"
            )
        if (self.host_to_device_ratio is None) == (self.host_pool_gib is None):
            raise StartupError("hisparse-config: give host_to_device_ratio or host_pool_gib, not both")
        for key in ("host_to_device_ratio", "host_pool_gib"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise StartupError(f"hisparse-config: {key} must be positive, found {value}")
        if self.swap_in_block_size not in (None, 32, 64, 128, 256, 512, 1024):
            raise StartupError(
                "hisparse-config: swap_in_block_size must be a power of two from 32 to 1024, "
                f"found {self.swap_in_block_size}"
            )


_INTEGERS = ("device_buffer_size", "top_k", "swap_in_block_size")
_NUMBERS = ("host_to_device_ratio", "host_pool_gib")


def parse_config(text: str | None, model_top_k: int) -> HiSparseConfig:
    """Read the JSON object that `--hisparse-config` was given (None: all defaults).

    Defaults: the model's top_k, a buffer of twice that, ratio 8. Raises StartupError for anything that is not JSON,
    unknown, of the wrong type or out of range, and for a top_k other than the model's.
    """
    values = _read(text)
    top_k = int(values.get("top_k", model_top_k))
    if top_k != model_top_k:
        raise StartupError(
            f"hisparse-config: top_k is {top_k}, but the model selects {model_top_k} positions (its index_topk): "
            "leave top_k out"
        )
    ratio, gib = values.get("host_to_device_ratio"), values.get("host_pool_gib")
    block_size = values.get("swap_in_block_size")
    if ratio is None and gib is None:
        ratio = DEFAULT_HOST_TO_DEVICE_RATIO
    return HiSparseConfig(
        device_buffer_size=int(values.get("device_buffer_size", 2 * top_k)),
        top_k=top_k,
        host_to_device_ratio=ratio,
        host_pool_gib=gib,
        swap_in_block_size=None if block_size is None else int(block_size),
    )


def _read(text: str | None) -> dict[str, float]:
    """The keys that were given, each known and a number of its type."""
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise StartupError(f"hisparse-config: not valid JSON ({error}): {text}") from error
    if not isinstance(values, dict):
        raise StartupError(f"hisparse-config: expected a JSON object, found {text}")
    for key, value in values.items():
        if key not in _INTEGERS + _NUMBERS:
            known = ", ".join(sorted(_INTEGERS + _NUMBERS))
            raise StartupError(f"hisparse-config: unknown key {key!r}, the known ones are {known}")
        wanted = int if key in _INTEGERS else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "an integer" if key in _INTEGERS else "a number"
            raise StartupError(f"hisparse-config: {key} must be {kind}, found {json.dumps(value)}")
    return values
