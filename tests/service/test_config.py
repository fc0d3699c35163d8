"""What a node is told about addresses and ports."""

from pathlib import Path

import pytest

from base.errors import StartupError
from service.config import NodeConfig
from service.node_model import check, claim_transfer_ports


def config(**flags: str) -> NodeConfig:
    return NodeConfig(model_path=Path("none"), insecure=True, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "advertised", "data"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"host": "10.0.0.2"}, "10.0.0.2", "10.0.0.2"),
        ({"host": "0.0.0.0", "advertise_host": "10.0.0.2"}, "10.0.0.2", "10.0.0.2"),
        ({"host": "10.0.0.2", "transfer_host": "10.1.0.2"}, "10.0.0.2", "10.1.0.2"),
        ({"host": "0.0.0.0", "advertise_host": "10.0.0.2", "transfer_host": "node-2.data"}, "10.0.0.2", "node-2.data"),
    ],
)
def test_kv_travels_to_the_transfer_host_or_else_to_where_everything_goes(
    flags: dict[str, str], advertised: str, data: str
) -> None:
    node = config(**flags)
    check(node)
    assert (node.advertised_host, node.data_host) == (advertised, data)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"transfer_host": "0.0.0.0"}, "--transfer-host 0.0.0.0 is not an address that others can reach"),
        ({"transfer_host": "::"}, "--transfer-host :: is not an address that others can reach"),
        ({"transfer_host": "fe80::1"}, "--transfer-host fe80::1: expected a host name or an IPv4 address"),
        ({"transfer_host": ""}, "--transfer-host : expected a host name or an IPv4 address"),
        ({"host": "0.0.0.0", "transfer_host": "10.1.0.2"}, "give --advertise-host too"),
        ({"transfer_ports": "15000"}, "--transfer-ports 15000: expected MIN-MAX"),
        ({"transfer_ports": "15000-15000", "transfer_protocol": "tcp"}, "1 ports, but 2 are needed"),
    ],
)
def test_what_is_no_address_and_no_range_is_refused(flags: dict[str, str], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        check(config(**flags))


def test_a_node_without_an_engine_takes_no_ports() -> None:
    assert claim_transfer_ports(config(transfer_protocol="shm")) is None
