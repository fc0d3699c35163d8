"""The API keys of clients."""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from base.errors import StartupError
from gateway.config import API_KEYS_VARIABLE
from service.watched import WatchedFiles


class ApiKeys:
    """The accepted keys, as digests. Raises StartupError for a key that no client could send, and an unusable file."""

    def __init__(self, keys: Sequence[str], file: Path | None, priority_file: Path | None = None) -> None:
        """priority_file: has further keys, those whose requests may go before others."""
        self._fixed = [_digest(_checked(key, f"--api-key or {API_KEYS_VARIABLE}").encode()) for key in keys]
        self._file = _watched("--api-key-file", file)
        self._priority_file = _watched("--priority-key-file", priority_file)

    def __len__(self) -> int:
        return len(self._digests())

    def accept(self, authorization: bytes) -> bool:
        """Whether a header is `Bearer KEY`. In constant time: compares all digests, which have one length."""
        scheme, _, key = authorization.partition(b" ")
        return _is_one_of(key.strip(), self._digests()) and scheme.lower() == b"bearer"

    def may_go_first(self, key: bytes) -> bool:
        """Whether requests with an accepted key may go before others."""
        return self._priority_file is not None and _is_one_of(key, self._priority_file.get())

    def _digests(self) -> list[bytes]:
        return [*self._fixed, *(digest for file in (self._file, self._priority_file) if file for digest in file.get())]


def _is_one_of(key: bytes, digests: Sequence[bytes]) -> bool:
    given = _digest(key)
    matches = [secrets.compare_digest(given, known) for known in digests]
    return any(matches)


def _watched(flag: str, file: Path | None) -> WatchedFiles[list[bytes]] | None:
    return None if file is None else WatchedFiles((file,), lambda: _read(flag, file))


def _read(flag: str, file: Path) -> list[bytes]:
    try:
        with file.open(encoding="utf-8") as lines:
            mode = os.fstat(lines.fileno()).st_mode
            keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise StartupError(f"{flag} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{flag} {file}: expected text, one key per line") from error
    if mode & stat.S_IROTH:
        raise StartupError(f"{flag} {file}: anyone on this machine can read it; chmod 600 or 640 it")
    if not keys:
        raise StartupError(f"{flag} {file}: expected one key per line, found none")
    return [_digest(_checked(key, f"{flag} {file}").encode()) for key in keys]


def _checked(key: str, source: str) -> str:
    """The key. Raises StartupError, which names the source but never the key."""
    if not re.fullmatch(r"[!-~]+", key):
        raise StartupError(f"{source}: a key must be printable ASCII without spaces, and not empty")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
