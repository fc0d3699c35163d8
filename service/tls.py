"""The TLS context of a server, from a certificate and its private key."""

import ssl
from pathlib import Path

from base.errors import StartupError
from service.watched import WatchedFiles


def server_tls(certfile: Path | None, keyfile: Path | None) -> WatchedFiles[ssl.SSLContext] | None:
    """The context for new connections, made again when the files change; None without files.

    Raises StartupError if only one is given, or if they cannot be used together.
    """
    if certfile is None and keyfile is None:
        return None
    if certfile is None:
        raise StartupError("--ssl-keyfile without --ssl-certfile: TLS needs a certificate and its private key")
    if keyfile is None:
        raise StartupError("--ssl-certfile without --ssl-keyfile: TLS needs a certificate and its private key")
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
