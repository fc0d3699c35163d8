"""Checks that ports reachable from other machines need keys."""

import ipaddress
from pathlib import Path

from base.errors import StartupError


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach that address. Looks up no name: of names, only `localhost` counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_processes(flag: str, host: str, key_dir: Path | None, insecure: bool) -> None:
    """Raises StartupError if other machines could reach the control port without a key. flag: which set `host`."""
    if not is_loopback(host) and key_dir is None and not insecure:
        raise StartupError(
            f"{flag} {host}: other machines reach it, so it takes keys: make them with `hisparse-pd keygen DIR` and "
            "give --key-dir DIR; or --insecure, if whoever reaches this address may do as they like"
        )


def check_clients(host: str, has_key: bool, insecure: bool) -> None:
    """Raises StartupError if other machines could reach the HTTP API without a key."""
    if not is_loopback(host) and not has_key and not insecure:
        raise StartupError(
            f"--host {host}: other machines reach it, so clients need an API key: give --api-key (or set "
            "HISPARSE_PD_API_KEY); or --insecure, if whoever reaches this address may use the service"
        )
