"""HEALTHCHECK of the images: asks process 1 for /health, where its command line says that it listens."""

import ssl
import sys
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

PORTS = {"serve": 8000, "gateway": 8000, "prefill": 8010, "decode": 8020}
"""Of each command, unless it was given another."""
TIMEOUT_S = 4


def health_url(words: Sequence[str]) -> str | None:
    """Where the process with this command line answers; None for a command that serves nothing."""
    command = next((word for word in words if word in PORTS), None)
    if command is None:
        return None
    host = _option(words, "--host") or "127.0.0.1"
    port = _option(words, "--port") or PORTS[command]
    scheme = "https" if _option(words, "--ssl-certfile") else "http"
    return f"{scheme}://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/health"


def _option(words: Sequence[str], name: str) -> str | None:
    """The last value that an option was given, as `--name value` or `--name=value`."""
    found = None
    for word, following in pairwise([*words, ""]):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.removeprefix(f"{name}=")
    return found


def main() -> None:
    url = health_url(Path("/proc/1/cmdline").read_text().split("\0"))
    if url is None:
        return
    # It asks itself: whose certificate it is does not matter.
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context)
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
