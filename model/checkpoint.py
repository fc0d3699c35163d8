"""Finds the files of a Hugging Face checkpoint, checks that they are complete and fingerprints them without loading."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from typing_extensions import TypedDict  # pydantic takes the one of typing from Python 3.12 on

from base.errors import StartupError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"

# Keys that depend on who saved or loads the checkpoint, and not on what the model computes.
VOLATILE_CONFIG_KEYS = frozenset(
    {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"}
)

SAMPLE_BYTES = 64 << 10
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; StartupError where the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing = path.name if path.parent.is_dir() else "such directory"
        raise StartupError(f"--model-path {path.parent}: no {missing}; give a Hugging Face checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name; StartupError where there are none or one is not within it."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    if not (path / INDEX_FILE).is_file():
        raise StartupError(f"{path} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}")
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{path / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if {"..", "/"} & {*Path(name).parts} or not (path / name).is_file()]
    if missing:
        raise StartupError(
            f"{path} lacks {len(missing)} of the {len(names)} weight files that {INDEX_FILE} names: "
            f"{', '.join(missing[:3])}"
        )
    return [path / name for name in names]


def has_weight(path: Path, name: str) -> bool:
    """Whether a checkpoint has a weight of that name. Raises as `weight_files` does, and for a damaged file."""
    (file, *others) = weight_files(path)
    if others or file.name != SINGLE_FILE:
        return name in read_json(path / INDEX_FILE)["weight_map"]
    with file.open("rb") as stream:
        return name in read_header(stream, file)[1]


def fingerprint(config: dict[str, Any], files: list[Path]) -> str:
    """A short identity of a model: 16 hex digits over its configuration and samples of its weights.

    Of each weight file it hashes the name, the size, the header and samples of the head, the middle and the tail. So
    hundreds of gigabytes take milliseconds. Raises StartupError where a file is damaged.
    """
    digest = _stable(config)
    for file in files:
        digest.update(file.name.encode())
        for part in _identifying_parts(file):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.hexdigest()[:16]


def config_digest(config: dict[str, Any]) -> str:
    """16 hex digits over the keys of the configuration that determine what the model computes."""
    return _stable(config).hexdigest()[:16]


def tokenizer_digest(path: Path) -> str:
    """16 hex digits over the checkpoint's tokenizer.json, or an empty string where it has none."""
    try:
        with (path / TOKENIZER_FILE).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StartupError(f"{path / TOKENIZER_FILE} cannot be read: {error}") from error


def _stable(config: dict[str, Any]) -> "hashlib._Hash":
    stable = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode())


def _identifying_parts(file: Path) -> list[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header, _ = read_header(stream, file)
        data_begin = 8 + len(header)
        last_sample = max(data_begin, size - SAMPLE_BYTES)
        parts = [struct.pack("<Q", size), header]
        for offset in (data_begin, (data_begin + last_sample) // 2, last_sample):
            stream.seek(offset)
            parts.append(stream.read(SAMPLE_BYTES))
    return parts


class HeaderEntry(TypedDict):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


class _Header(BaseModel):
    """Tensors by their names, and what is no tensor."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, HeaderEntry]
    metadata: Any = Field(None, alias="__metadata__")


def read_header(stream: BinaryIO, file: Path) -> tuple[bytes, dict[str, HeaderEntry]]:
    """The JSON header of a safetensors file, from its beginning on, and the tensors that it names. Raises StartupError
    for a damaged file, and for one whose tensors do not end where it ends."""
    size = file.stat().st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise StartupError(f"{file} is not a complete safetensors file: its header is cut off")
    header = stream.read(length)
    try:
        tensors = _Header.model_validate_json(header).__pydantic_extra__
    except ValidationError as error:
        raise StartupError(f"{file} is not a safetensors file: its header is not valid") from error
    data_bytes = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if 8 + length + data_bytes != size:
        raise StartupError(f"{file} should be {8 + length + data_bytes} bytes long by its header, but it is {size}")
    return header, tensors
