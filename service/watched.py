"""Values read from files, and again when these change: keys and certificates are replaced without a restart."""

import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from base.errors import StartupError

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 1.0


class WatchedFiles(Generic[T]):
    """The value that `read` makes of the files. The constructor raises StartupError if `read` does."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._versions = [_version(path) for path in paths]
        self._looked = time.monotonic()
        self._value = read()

    def get(self) -> T:
        """The value. Looks once a second. A changed file that cannot be used is logged, and the value stays."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            versions = [_version(path) for path in self._paths]
            if versions != self._versions:
                self._versions = versions
                try:
                    self._value = self._read()
                except StartupError as error:
                    log.error("a changed file cannot be used; what was read before stays in force", reason=str(error))
                else:
                    log.info("read again after a change", files=", ".join(map(str, self._paths)))
        return self._value


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # Not the time of the last write: a file that everyone could read is used once its mode has changed.
    return status.st_ctime_ns, status.st_ino, status.st_size


def server_tls(certfile: Path | None, keyfile: Path | None) -> WatchedFiles[ssl.SSLContext] | None:
    """The context for new connections, made again when files change; None without. Raises StartupError if unusable."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        given, missing = ("keyfile", "certfile") if certfile is None else ("certfile", "keyfile")
        raise StartupError(f"--ssl-{given} without --ssl-{missing}: TLS needs a certificate and its private key")
    return WatchedFiles((certfile, keyfile), lambda: _context(certfile, keyfile))


def _context(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise StartupError(f"{flag} {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise StartupError(f"--ssl-keyfile {keyfile}: expected a private key without a passphrase")

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").replace("_", " ").lower()
        raise StartupError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used ({reason}): "
            "expected a certificate chain and its private key, both PEM"
        ) from error
    return context
