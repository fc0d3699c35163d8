"""HEALTHCHECK of the images: asks process 1 for /health, on the port of the command that it was started with.

HEALTH_URL in the container's environment says another place, for a process with --port, --host or --ssl-certfile.
"""

import os
import ssl
import sys
import urllib.request
from pathlib import Path

PORTS = {"serve": 8000, "gateway": 8000, "prefill": 8010, "decode": 8020}
TIMEOUT_S = 4


def health_url(process: str) -> str | None:
    """Where the process with this command line or title answers; None for a command that serves nothing."""
    if url := os.environ.get("HEALTH_URL"):
        return url
    command = next((word for word in process.replace("\0", " ").split() if word in PORTS), None)
    return None if command is None else f"http://127.0.0.1:{PORTS[command]}/health"


def main() -> None:
    url = health_url(Path("/proc/1/cmdline").read_text())
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
