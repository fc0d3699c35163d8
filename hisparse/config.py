"""`--hisparse-config`, read once into a typed object. Imports no torch: `serve` reads it before it starts nodes."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes the one of typing from Python 3.12 on

from base.errors import StartupError

DEFAULT_HOST_TO_DEVICE_RATIO = 8.0
MAX_DEVICE_BUFFER_SIZE = 2**15 - 1
"""The position table holds hot indices as int16: it is the biggest table, and int32 would double it."""


@dataclass(frozen=True)
class HiSparseConfig:
    """How to size the KV tiers. Exactly one of host_to_device_ratio and host_pool_gib is set.

    device_buffer_size: hot slots of a request, without the extra ones for the tokens of a step. top_k: positions that a
    layer selects. host_to_device_ratio: host slots / hot slots. host_pool_gib: size of the host pool in GiB.
    swap_in_block_size: threads per block of the CUDA swap-in kernel; None: the backend chooses. resident_rows: whether
    requests have all of their KV in hot slots while there are enough. larger_buffers: whether `device_buffer_size` is
    the least, and device memory that is left makes buffers larger.
    """

    device_buffer_size: int
    top_k: int
    host_to_device_ratio: float | None = DEFAULT_HOST_TO_DEVICE_RATIO
    host_pool_gib: float | None = None
    swap_in_block_size: int | None = None
    resident_rows: bool = True
    larger_buffers: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.device_buffer_size <= MAX_DEVICE_BUFFER_SIZE:
            raise StartupError(
                f"hisparse-config: device_buffer_size must be at least top_k ({self.top_k}), so that the buffer holds "
                f"all that one step selects, and at most {MAX_DEVICE_BUFFER_SIZE}, found {self.device_buffer_size}"
            )
        if (self.host_to_device_ratio is None) == (self.host_pool_gib is None):
            raise StartupError("hisparse-config: give host_to_device_ratio or host_pool_gib, not both")


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Options(TypedDict, total=False):
    """The JSON object: these keys and types only."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    device_buffer_size: int
    top_k: int
    host_to_device_ratio: Positive
    host_pool_gib: Positive
    swap_in_block_size: Literal[32, 64, 128, 256, 512, 1024]
    resident_rows: bool


_MESSAGES = {
    "json_invalid": "not valid JSON ({error}): {text}",
    "dict_type": "expected a JSON object, found {text}",
    "extra_forbidden": "unknown key {key!r}, the known ones are {known}",
    "bool_type": "{key} must be true or false, found {json}",
    "int_type": "{key} must be an integer, found {json}",
    "float_type": "{key} must be a number, found {json}",
    "greater_than": "{key} must be positive, found {value}",
    "finite_number": "{key} must be positive, found {value}",
    "literal_error": "{key} must be a power of two from 32 to 1024, found {json}",
}
"""The error message for each type of pydantic's errors."""


def parse_config(text: str | None, model_top_k: int) -> HiSparseConfig:
    """Read the JSON object of `--hisparse-config` (None: all defaults).

    Defaults: the model's top_k, a buffer of at least twice that, ratio 8. Raises StartupError for text that is not
    JSON, for keys and values that are unknown, of the wrong type or out of range, and for a top_k that is not the
    model's.
    """
    try:
        given = _Options() if text is None else TypeAdapter(_Options).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        message = _MESSAGES.get(first["type"], first["msg"]).format(
            key="".join(map(str, first["loc"])),
            value=first["input"],
            json=json.dumps(first["input"]),
            text=text,
            known=", ".join(sorted(_Options.__annotations__)),
            **first.get("ctx", {}),
        )
        raise StartupError(f"hisparse-config: {message}") from error
    if given.get("top_k", model_top_k) != model_top_k:
        raise StartupError(
            f"hisparse-config: top_k is {given['top_k']}, but the model selects {model_top_k} positions "
            "(its index_topk): leave top_k out"
        )
    options: dict[str, Any] = {"top_k": model_top_k, "device_buffer_size": 2 * model_top_k, **given}
    options["larger_buffers"] = "device_buffer_size" not in given
    if "host_pool_gib" in given:
        options.setdefault("host_to_device_ratio", None)
    return HiSparseConfig(**options)
