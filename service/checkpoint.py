"""What a process says of the checkpoint that it was started with."""

from pathlib import Path

from base.errors import StartupError
from control.messages import CheckpointIdentity
from model.checkpoint import config_digest, read_json, tokenizer_digest


def identify(path: Path) -> CheckpointIdentity:
    """Read from small files, without torch. Raises StartupError where the directory is not a checkpoint."""
    config = read_json(path / "config.json")
    return CheckpointIdentity(
        vocab_size=positive_int(config, "vocab_size", path),
        config=config_digest(config),
        tokenizer=tokenizer_digest(path),
    )


def positive_int(config: dict[str, object], key: str, path: Path) -> int:
    """A size out of config.json. Raises StartupError if it is none."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{path}/config.json: {key} must be a positive integer, found {value!r}")
    return value
