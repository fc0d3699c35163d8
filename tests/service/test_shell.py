"""What a node has around its loop, and the HTTP status page."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from base.errors import StartupError
from base.metrics import Metrics
from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from control.messages import Cancel
from control.plane import ControlPlane, ControlPlaneFailed
from service import shell
from service.config import NodeConfig
from service.shell import NodeShell, closing_command
from service.status import bind_http, metrics_router, status_router
from tests.e2e.cluster import wait_until


def test_messages_to_a_loop_that_stands_still_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded; whatever is dropped is an answer to, or one of, messages that are repeated."""
    monkeypatch.setattr(shell, "MAX_WAITING", 10)
    node: NodeShell[str] = NodeShell("decode", NodeConfig(model_path=Path("none")))
    peer = ControlPlane("gateway", "127.0.0.1", 0, "127.0.0.1", deliver=lambda sender, message: None)
    try:
        node.control.start()
        peer.start()
        for number in range(25):
            peer.send(node.control.me, Cancel(request_id=str(number)))
        wait_until(lambda: dropped(node) == 15, what="the rest to be dropped")
        node.inbox.put("an event of the node's own is never dropped")
        messages = [item[1] for item in node.receive(0.0) if not isinstance(item, str)]
        assert messages == [Cancel(request_id=str(number)) for number in range(10)]

        peer.send(node.control.me, Cancel(request_id="again"))
        assert node.receive(5.0) == [(peer.me, Cancel(request_id="again"))]
        assert dropped(node) == 15
    finally:
        peer.stop()
        node.close()


def dropped(node: NodeShell[str]) -> float:
    node._refresh(lambda: None)
    value = node.metrics.registry.get_sample_value("hisparse_pd_control_dropped")
    assert value is not None
    return value


def test_a_node_whose_control_thread_has_ended_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be deaf, and /health would go on saying 200."""
    node: NodeShell[str] = NodeShell("decode", NodeConfig(model_path=Path("none")))
    try:
        assert node.receive(0.0) == []

        def broken() -> None:
            raise OSError("out of sockets")

        monkeypatch.setattr(node.control, "_send_due", broken)
        node.control.start()
        node.control._thread.join(10)
        with pytest.raises(ControlPlaneFailed, match="out of sockets"):
            node.receive(0.0)
    finally:
        node.close()


def test_open_transfer_ports_are_said_with_the_command_that_closes_them() -> None:
    command = closing_command(NodeConfig(model_path=Path("none"), transfer_ports="15000-15015"))
    assert "iifname != lo tcp dport 15000-15015 reject" in command
    far = closing_command(NodeConfig(model_path=Path("none"), transfer_host="10.1.0.2"))
    assert far.startswith("nft -f deploy/nftables/hisparse-pd.nft")
    if os.geteuid() or not shutil.which("nft"):
        pytest.skip("takes root and nftables")
    loaded = ["unshare", "--net", "sh", "-c", f"{command} && nft list ruleset"]
    listed = subprocess.run(loaded, capture_output=True, text=True, check=True).stdout
    assert 'iifname != "lo" tcp dport 15000-15015 reject' in listed


@pytest.mark.parametrize("host", ["a..b", "no-such-host.invalid", "ü..b", "a\0b"])
def test_a_host_that_cannot_be_bound_is_an_error_that_names_the_flag(host: str) -> None:
    """Also one that Python itself refuses, with a TypeError."""
    with pytest.raises(StartupError, match=r"cannot bind the HTTP port .*choose another --host"):
        bind_http(host, 0)


def test_a_process_says_its_version_and_that_of_its_protocol() -> None:
    app = FastAPI()
    app.include_router(status_router(lambda: None))
    app.include_router(metrics_router(Metrics(), lambda: None))
    with TestClient(app) as client:
        assert client.get("/version").json() == {"version": VERSION, "protocol": PROTOCOL_VERSION}
