"""The API keys of clients.

A file of keys has one on each line, after it its settings:
`sk-4f1c name=search max-concurrent-requests=8 tokens-per-minute=200000`.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from base.errors import StartupError
from gateway.config import API_KEYS_VARIABLE
from service.watched import WatchedFiles

UNNAMED = "unnamed"
_NUMBER = r"[1-9]\d{0,11}"
_SETTINGS = {"name": r"[\w.-]{1,64}", "max-concurrent-requests": _NUMBER, "tokens-per-minute": _NUMBER}


@dataclass(frozen=True)
class Client:
    """Who sends a request. name: of its key in logs and metrics; None if clients need none. None: no limit."""

    key: bytes = b""
    name: str | None = None
    goes_first: bool = False
    """Whether its requests may go before others."""
    operates: bool = False
    """Whether it may see what /v1/cluster says of all clients' requests."""
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


_Key = tuple[bytes, Client]
"""The digest of an accepted key, and who sends it; without the key itself."""


class ApiKeys:
    """The accepted keys, as digests. Raises StartupError for a key that no client could send, and an unusable file."""

    def __init__(
        self,
        keys: Sequence[str],
        file: Path | None,
        priority_file: Path | None = None,
        operator_file: Path | None = None,
    ) -> None:
        """priority_file, operator_file: have further keys, of clients that may go before others, or are operators."""
        self._fixed: list[_Key] = [
            (_digest(key, f"--api-key or {API_KEYS_VARIABLE}"), Client(name=UNNAMED)) for key in keys
        ]
        named = (
            ("--api-key-file", file, Client()),
            ("--priority-key-file", priority_file, Client(goes_first=True)),
            ("--operator-key-file", operator_file, Client(operates=True)),
        )
        self._files = [
            WatchedFiles((path,), partial(_read, flag, path, rights))
            for flag, path, rights in named
            if path is not None
        ]

    def __len__(self) -> int:
        return len(self._accepted())

    def find(self, authorization: bytes) -> Client | None:
        """Whose header `Bearer KEY` it is, or None. In constant time: compares all digests, which have one length."""
        scheme, _, text = authorization.partition(b" ")
        key = text.strip()
        given = hashlib.sha256(key).digest()
        matches = [client for digest, client in self._accepted() if secrets.compare_digest(given, digest)]
        if not matches or scheme.lower() != b"bearer":
            return None
        return replace(matches[-1], key=key)

    def _accepted(self) -> list[_Key]:
        return [*self._fixed, *(key for file in self._files for key in file.get())]


def _read(flag: str, file: Path, rights: Client) -> list[_Key]:
    try:
        with file.open(encoding="utf-8") as lines:
            mode = os.fstat(lines.fileno()).st_mode
            keys = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise StartupError(f"{flag} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{flag} {file}: expected text, one key per line") from error
    if mode & stat.S_IROTH:
        raise StartupError(f"{flag} {file}: anyone on this machine can read it; chmod 600 or 640 it")
    if not keys:
        raise StartupError(f"{flag} {file}: expected one key per line, found none")
    return [_key(words, f"{flag} {file}", rights) for words in keys]


def _key(words: Sequence[str], source: str, rights: Client) -> _Key:
    """The key of a line. Raises StartupError, which tells nothing of the line but names of settings."""
    settings = dict(word.partition("=")[::2] for word in words[1:])
    if not all(
        name in _SETTINGS and re.fullmatch(_SETTINGS[name], value, re.ASCII) for name, value in settings.items()
    ):
        raise StartupError(
            f"{source}: expected KEY on a line, and after it at most name=NAME (up to 64 letters, digits, '_', '.', "
            "'-'), max-concurrent-requests=NUMBER and tokens-per-minute=NUMBER (1 and more)"
        )
    name = settings.pop("name", UNNAMED)
    limits: dict[str, Any] = {setting.replace("-", "_"): int(number) for setting, number in settings.items()}
    return _digest(words[0], source), replace(rights, name=name, **limits)


def _digest(key: str, source: str) -> bytes:
    """Of an accepted key. Raises StartupError for one that no client could send. It names the source, never the key."""
    if not re.fullmatch(r"[!-~]+", key):
        raise StartupError(f"{source}: a key must be printable ASCII without spaces, and not empty")
    return hashlib.sha256(key.encode()).digest()
