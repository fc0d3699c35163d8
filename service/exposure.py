"""What may be reached from other machines, and what that takes."""

import ipaddress
from pathlib import Path

from base.errors import StartupError


def is_loopback(host: str) -> bool:
    """Whether what is bound to that address is out of reach for other machines.

    No name is looked up: `localhost` is the only one that counts.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_processes(flag: str, host: str, key_dir: Path | None, insecure: bool) -> None:
    """Raises StartupError if processes of other machines could speak to this one unproved, and nobody asked for that.

    flag: what `host` was given by.
    """
    if not is_loopback(host) and key_dir is None and not insecure:
        raise StartupError(
            f"{flag} {host}: other machines reach it, so it takes keys: make them with `hisparse-pd keygen DIR` and "
            "give --key-dir DIR; or --insecure, if whoever reaches this address may do as they like"
        )


def check_clients(host: str, has_key: bool, insecure: bool) -> None:
    """The same for clients of the HTTP API, who show an API key."""
    if not is_loopback(host) and not has_key and not insecure:
        raise StartupError(
            f"--host {host}: other machines reach it, so clients need an API key: give --api-key (or set "
            "HISPARSE_PD_API_KEY); or --insecure, if whoever reaches this address may use the service"
        )
