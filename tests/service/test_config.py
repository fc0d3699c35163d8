"""What a node is told about addresses, ports, keys and its device."""

import os
from pathlib import Path

import pytest
import torch

from base.errors import StartupError
from model.tiny import write_tiny_checkpoint
from service.checkpoint import identity_of
from service.config import (
    NodeConfig,
    SpeculativeNumSteps,
    check_clients,
    check_processes,
    drafts_of,
    is_loopback,
)
from service.node_checks import check, claim_transfer_ports
from service.node_model import NodeModel, use_device


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
def test_kv_travels_to_the_transfer_host_if_there_is_one(flags: dict[str, str], advertised: str, data: str) -> None:
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


ELSEWHERE = ("0.0.0.0", "10.0.0.1", "::", "fe80::1", "node-7", "localhost.example", "")
HERE = ("127.0.0.1", "127.9.9.9", "::1", "localhost")


def test_loopback() -> None:
    assert [host for host in (*ELSEWHERE, *HERE) if is_loopback(host)] == list(HERE)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_elsewhere_takes_keys_or_insecure(host: str) -> None:
    with pytest.raises(StartupError, match=r"--host .*keygen.*--key-dir.*--insecure"):
        check_processes("--host", host, None, insecure=False)
    check_processes("--host", host, Path("keys"), insecure=False)
    check_processes("--host", host, None, insecure=True)
    with pytest.raises(StartupError, match=r"--host .*--api-key.*--insecure"):
        check_clients(host, has_key=False, insecure=False)
    check_clients(host, has_key=True, insecure=False)
    check_clients(host, has_key=False, insecure=True)


@pytest.mark.parametrize("host", HERE)
def test_loopback_takes_nothing(host: str) -> None:
    check_processes("--host", host, None, insecure=False)
    check_clients(host, has_key=False, insecure=False)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which torch finds as many devices as CUDA_VISIBLE_DEVICES leaves of four."""

    def visible() -> int:
        return len((os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3").split(","))

    # Set and removed, so that it is as it was after the test, whatever the test's subject writes to it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", visible)
    return monkeypatch


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("flag", "seen"), [("cuda", "0"), ("cuda:0", "0"), ("cuda:3", "3")])
def test_a_process_sees_its_own_gpu_only(flag: str, seen: str) -> None:
    assert use_device(flag) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_numbers_count_what_the_process_was_given(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f1a")
    assert use_device("cuda:1") == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5f1a"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("flag", ["cuda:4", "cuda:-1", "cuda:one", "cpu:0", "mps", ""])
def test_a_device_that_is_not_there_stops_the_start(flag: str) -> None:
    with pytest.raises(StartupError, match=f"--device {flag}: "):
        use_device(flag)


def test_on_a_cpu_nothing_is_hidden(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert use_device("cpu") == torch.device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("steps", "has_draft_layer", "drafts"),
    [("0", True, 0), ("0", False, 0), ("auto", False, 0), ("auto", True, 3), ("2", True, 2)],
)
def test_a_node_drafts_if_its_checkpoint_can(steps: SpeculativeNumSteps, has_draft_layer: bool, drafts: int) -> None:
    assert drafts_of(steps, has_draft_layer) == drafts


def test_drafts_that_are_asked_for_need_the_layer() -> None:
    with pytest.raises(StartupError, match=r"^--speculative-num-steps 2: the checkpoint has no multi-token prediction"):
        drafts_of("2", has_draft_layer=False)


@pytest.mark.parametrize(("steps", "drafts", "layer"), [("0", 0, None), ("2", 2, 4)])
def test_a_node_has_the_draft_layer_if_it_drafts(
    tmp_path: Path, steps: SpeculativeNumSteps, drafts: int, layer: int | None
) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=1)
    node = NodeModel.of("prefill", NodeConfig(model_path=tmp_path, speculative_num_steps=steps))
    assert (node.drafts, node.spec.draft_layer) == (drafts, layer)
    assert identity_of(node.spec).draft_layer == (layer is not None)
