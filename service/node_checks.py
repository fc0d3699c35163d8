"""What can be said against a node's flags without its model or its device. Imports no torch: `serve` asks, too."""

import re

from base.errors import StartupError
from control.messages import ADDRESS_PATTERN
from service.config import NodeConfig, check_processes
from service.kv_events import parse_kv_events
from transfer.ports import ClaimedPorts, parse_ports
from transfer.transports import choose_transports, num_engines

_WILDCARDS = ("0.0.0.0", "::")


def check(config: NodeConfig) -> None:
    """Raises StartupError for invalid values, or for a transport that this machine lacks."""
    if config.mem_fraction_static is not None and not 0 < config.mem_fraction_static < 1:
        raise StartupError(f"--mem-fraction-static {config.mem_fraction_static}: expected a number between 0 and 1")
    if config.host in _WILDCARDS and not config.advertise_host:
        raise StartupError(f"--host {config.host} is not an address that others can reach; give --advertise-host too")
    check_processes("--host", config.host, config.key_dir, config.insecure)
    if config.transfer_host is not None:
        if config.transfer_host in _WILDCARDS:
            raise StartupError(
                f"--transfer-host {config.transfer_host} is not an address that others can reach; give one of the "
                "data network"
            )
        if not re.match(ADDRESS_PATTERN, f"{config.transfer_host}:0"):
            raise StartupError(f"--transfer-host {config.transfer_host}: expected a host name or an IPv4 address")
    parse_kv_events(config.kv_events_config, config.insecure)
    parse_ports(config.transfer_ports, _num_engines(config))
    for gateway in config.gateways:
        if not re.match(ADDRESS_PATTERN, gateway):
            raise StartupError(f"--gateway {gateway}: expected HOST:PORT, the gateway's control port")


def claim_transfer_ports(config: NodeConfig) -> ClaimedPorts | None:
    """The ports of this node's transfer engines; None if it has no engine. Raises StartupError if none are free."""
    engines = _num_engines(config)
    return ClaimedPorts(parse_ports(config.transfer_ports, engines), engines) if engines else None


def _num_engines(config: NodeConfig) -> int:
    """Raises StartupError for a transport that this machine lacks."""
    return num_engines(choose_transports(config.transfer_protocol, config.ib_device))
