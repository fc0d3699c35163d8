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
    """The accepted keys, kept as digests.

    Raises StartupError for a key that no client could send, and for a file without keys or that anyone can read.
    """

    def __init__(self, keys: Sequence[str], file: Path | None) -> None:
        self._fixed = [_digest(_checked(key, f"--api-key or {API_KEYS_VARIABLE}").encode()) for key in keys]
        self._file = None if file is None else WatchedFiles((file,), lambda: _read(file))

    def __len__(self) -> int:
        return len(self._digests())

    def accept(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header is `Bearer KEY`.

        Takes the same time for every key: compares digests, which have one length, and always all of them.
        """
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [secrets.compare_digest(given, known) for known in self._digests()]
        return scheme.lower() == b"bearer" and any(matches)

    def _digests(self) -> list[bytes]:
        return self._fixed + (self._file.get() if self._file else [])


def _read(file: Path) -> list[bytes]:
    try:
        with file.open(encoding="utf-8") as lines:
            mode = os.fstat(lines.fileno()).st_mode
            keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise StartupError(f"--api-key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--api-key-file {file}: expected text, one key per line") from error
    if mode & stat.S_IROTH:
        raise StartupError(f"--api-key-file {file}: anyone on this machine can read it; chmod 600 or 640 it")
    if not keys:
        raise StartupError(f"--api-key-file {file}: expected one key per line, found none")
    return [_digest(_checked(key, f"--api-key-file {file}").encode()) for key in keys]


def _checked(key: str, source: str) -> str:
    """The key. Raises StartupError, which names the source but never the key."""
    if not re.fullmatch(r"[!-~]+", key):
        raise StartupError(f"{source}: a key must be printable ASCII without spaces, and not empty")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
