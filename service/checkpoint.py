"""What nodes and gateways compare: the identity of a checkpoint and of a model."""

from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import StartupError
from control.messages import CheckpointIdentity, ModelIdentity
from model.checkpoint import config_digest, read_json, tokenizer_digest

if TYPE_CHECKING:
    from model.config import ModelSpec


def identify(path: Path) -> CheckpointIdentity:
    """Reads small files only, without torch. Raises StartupError if the directory is not a checkpoint."""
    config = read_json(path / "config.json")
    return CheckpointIdentity(
        vocab_size=positive_int(config, "vocab_size", path),
        config=config_digest(config),
        tokenizer=tokenizer_digest(path),
    )


def stop_token_ids(path: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json, or else of config.json."""
    generation = path / "generation_config.json"
    for config in (read_json(generation) if generation.is_file() else {}, read_json(path / "config.json")):
        found = config.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if valid := [i for i in ids if isinstance(i, int)]:
            return tuple(valid)
    return ()


def positive_int(config: dict[str, object], key: str, path: Path) -> int:
    """The value of `key` in config.json. Raises StartupError if it is not a positive integer."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{path}/config.json: {key} must be a positive integer, found {value!r}")
    return value


def identity_of(spec: "ModelSpec") -> ModelIdentity:
    """Everything that must be equal on two nodes before KV passes between them."""
    layout = spec.kv_layout
    return ModelIdentity(
        fingerprint=spec.fingerprint,
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_format=spec.kv_format.name,
        draft_layer=spec.draft_layer is not None,
        num_layers=layout.num_layers,
        num_index_layers=layout.num_index_layers,
        item_bytes=layout.item_bytes,
        index_key_bytes=layout.index_key_bytes,
    )
